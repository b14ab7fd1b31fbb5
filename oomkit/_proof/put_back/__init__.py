"""What a run of a proof has written is put back: tensors, and plain values of the program."""
