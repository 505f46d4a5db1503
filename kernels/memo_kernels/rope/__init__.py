"""Rotary position embedding, half-split: as a function of autograd, and in place."""
