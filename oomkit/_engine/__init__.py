"""What the engine, which is C, calls that is Python."""
