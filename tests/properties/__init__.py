"""Random programs, each beside one that computes the whole batch without oomkit."""
