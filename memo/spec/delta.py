"""The sizes of a gated delta net (memo.attention.delta_rule)."""

TAPS = 4
"""Tokens that a convolution reaches: a token and those just before it."""
CHUNK = 64
"""Tokens of a triangular system."""
GROUP = 8 * CHUNK
"""Tokens that are computed at a time; a backward has the graph of so many."""

RATES = (0.01, 16.0)
"""Bounds of the rates of decay at the start, which are drawn evenly."""


def carry_size(heads: int, key_heads: int, head_dim: int) -> int:
    """Elements of what a sequence carries from one range of tokens to the next: a matrix for each value head, and the
    channels of the last tokens."""
    return heads * head_dim**2 + (TAPS - 1) * (heads + 2 * key_heads) * head_dim
