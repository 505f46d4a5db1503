"""Causal attention over lists of rectangular blocks; knows nothing of parallelism."""
