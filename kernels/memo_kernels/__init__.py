"""Fused kernels, one folder an operation, each with a plain torch reference that is its CPU path and its oracle."""
