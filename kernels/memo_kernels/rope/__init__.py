"""Rotary position embedding, half-split, in place."""
