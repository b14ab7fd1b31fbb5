"""One file for each contender: `train(work)` and `evaluate(work)` as a user would write
them after its documentation, and `healthy(function)`, the function as its users call it."""
