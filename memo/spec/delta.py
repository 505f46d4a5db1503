"""The sizes of a gated delta net (memo.attention.delta_rule)."""

TAPS = 4
"""Tokens that a convolution reaches: a token and those just before it."""
CHUNK = 128
"""Tokens of a triangular system. Its products grow with the tokens; fewer tokens make more chunks, each of which is at
least one kernel. For heads of 128 numbers a group takes least memory with 128 tokens."""
_GROUP = 262144


def group_tokens(heads: int, batch: int) -> int:
    """Tokens of each sequence that are computed at a time; a backward holds the graph of this many tokens.

    All heads of all sequences together have 262,144 tokens of a group. Fewer take less memory and more kernels: with
    heads of 128 numbers a group takes 4.8 GB in fp32, and with a quarter of it a GPU is foreseen to wait for the host a
    third of the time.
    """
    return max(CHUNK, _GROUP // (heads * batch) // CHUNK * CHUNK)


FLA_CHUNK = 64
"""Tokens of a chunk of flash-linear-attention's kernels, which keep a matrix of each head before each chunk."""
FLA_DOCUMENTS = 16
"""Documents of all sequences in one call of flash-linear-attention, at most, or two of each sequence. Each document has
a matrix of each head before and after it, and in a backward their gradients, so thousands of short documents would take
more memory than their tokens."""
RATES = (0.01, 16.0)
"""Bounds of the initial rates of decay, which are drawn uniformly."""


def carry_size(heads: int, key_heads: int, head_dim: int) -> int:
    """Elements that a sequence carries from one range of tokens to the next: a matrix for each value head, and the
    channels of the last tokens."""
    return heads * head_dim**2 + (TAPS - 1) * (heads + 2 * key_heads) * head_dim


def fla_bytes(head_dim: int, key_dim: float, backward: bool) -> float:
    """Bytes, for each token and value head, of all tensors of 16 and 32 bits that a group of tokens makes at its peak
    with flash-linear-attention's kernels. `key_dim`: channels of keys for each value head.

    An upper bound, fitted to the requests of version 0.6 with heads of 16, 64 and 128: up to 5 % more than was counted
    (tests/kernels/test_kernels_delta.py).
    """
    if backward:
        return 20 * head_dim + 14 * key_dim + 4 * head_dim**2 / FLA_CHUNK + 165
    return 12 * head_dim + 12.5 * key_dim + 2 * head_dim**2 / FLA_CHUNK + 145


def fla_document_bytes(heads: int, head_dim: int, batch: int, backward: bool) -> int:
    """Bytes beside `fla_bytes` for the most documents in one call: matrices of each head, and chunks that documents do
    not fill."""
    return max(FLA_DOCUMENTS, 2 * batch) * heads * head_dim**2 * (16 if backward else 10)


def group_elements(head_dim: int, channels: float, backward: bool, mixed: bool) -> float:
    """Elements in the wide dtype, for each token and value head, of all tensors that a group of tokens makes at its
    peak. `channels`: channels of q, k and v for each value head; `mixed`: whether the model's dtype is narrower.

    An upper bound, fitted in chunks of 128 to the requests of torch's kernels, which CPUs and GPUs share, with heads of
    16 to 256, and one, two and four value heads a key head: with heads of 128, up to 3 % more than was counted, with
    others up to 8 % (tests/estimate/test_estimate_delta_memory.py).
    """
    if backward:
        return (15.05 - 0.3 * mixed) * head_dim + 3.72 * channels + 8.05 * CHUNK + 6.1 * head_dim**2 / CHUNK
    return 12.75 * head_dim + 3.05 * channels + 3.65 * CHUNK + 3.12 * head_dim**2 / CHUNK
