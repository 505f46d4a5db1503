"""The plain transformer, which has never heard of swapping."""
