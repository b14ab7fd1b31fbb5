"""What the graph of a backward tells: bounds, flows of gradients, and coefficients of a loss."""
