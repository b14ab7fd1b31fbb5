"""Several ranks: who they are, how they vote, and what a call of theirs agrees on."""
