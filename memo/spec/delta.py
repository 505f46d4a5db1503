"""The sizes of a gated delta net (memo.attention.delta_rule)."""

TAPS = 4
"""Tokens that a convolution reaches: a token and those just before it."""
CHUNK = 64
"""Tokens of a triangular system."""
GROUP = 32 * CHUNK
"""Tokens that are computed at a time; a backward has the graph of so many. Fewer take less memory, and more kernels."""

RATES = (0.01, 16.0)
"""Bounds of the rates of decay at the start, which are drawn evenly."""


def carry_size(heads: int, key_heads: int, head_dim: int) -> int:
    """Elements of what a sequence carries from one range of tokens to the next: a matrix for each value head, and the
    channels of the last tokens."""
    return heads * head_dim**2 + (TAPS - 1) * (heads + 2 * key_heads) * head_dim


def group_elements(head_dim: int, channels: float, backward: bool, mixed: bool) -> float:
    """Elements in the wide dtype, a token and value head, of all tensors that a group of tokens makes at its peak;
    `channels`: of q, k and v for each value head; `mixed`: whether the model's dtype is narrower.

    A bound, fitted to what torch's CPU kernels asked for at heads of 16, 64 and 128, with one and two value heads a key
    head: up to 3 % more than was measured (tests/estimate/test_estimate_program_memory.py).
    """
    if backward:
        return (18.5 - mixed) * head_dim + 3.35 * channels + 7.35 * CHUNK + 4.45 * head_dim**2 / CHUNK
    return 13.1 * head_dim + 2.1 * channels + 3.35 * CHUNK + 4.05 * head_dim**2 / CHUNK
