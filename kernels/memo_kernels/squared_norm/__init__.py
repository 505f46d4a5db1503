"""Sum of squares, for the norm of all gradients."""
