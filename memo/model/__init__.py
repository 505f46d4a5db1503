"""The plain transformer, which knows nothing of swapping."""
