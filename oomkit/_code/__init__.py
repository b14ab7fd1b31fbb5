"""What the code of a step shows before it runs."""
