"""What the ladder, which is C, calls that is Python."""
