"""What is voted on: the matter of a vote, beside the number of the call."""

REDUCTION, COMMIT, OWN, START, PROOF, WEIGHTS, UPDATED = range(1, 8)
