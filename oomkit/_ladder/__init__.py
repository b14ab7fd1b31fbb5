"""What is done where smaller micro-batches are not enough (the Python part)."""
