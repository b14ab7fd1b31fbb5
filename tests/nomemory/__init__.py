"""The interpreter's own memory runs out at every allocation in turn, in a process each."""
