"""Rotary position embedding, half-split: as an autograd function, and in place."""
