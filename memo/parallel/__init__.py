"""Tensor, context, pipeline and data parallelism, one file for each axis; callers pass the process groups."""
