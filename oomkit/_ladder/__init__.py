"""Python parts of the ladder, which is C: what is done where smaller micro-batches are not enough."""
