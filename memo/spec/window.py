"""Sliding-window attention: a query attends to the last W tokens of its document, itself included.

The tokens of a document are cut into strips of W tokens. A query attends to the keys of its own strip that do not come
after it, and to the keys of the strip before that are less than W tokens back. These two triangles have exactly the
scores of the window (memo.attention.blocks). Equal strips are the sequences of one kernel call.
"""

_CALL_TOKENS = 1 << 16
"""Tokens with which a kernel uses a device in full, and after which its results are soon freed."""
_CALL_STRIPS = 1024
"""More strips, times the heads that models have, would be more programs than one axis of a grid takes."""


def strips_of_calls(strips: int, apart: int, most_tokens: int) -> list[int]:
    """How many of `strips` equal strips each kernel call takes, all within reach (`most_tokens`) of the first one.

    Strips begin `apart` tokens apart, which is a window or more.
    """
    at_once = max(1, min(_CALL_STRIPS, min(_CALL_TOKENS, most_tokens) // apart))
    whole, rest = divmod(strips, at_once)
    return [at_once] * whole + [rest] * bool(rest)


def attended_pairs(tokens: int, window: int | None) -> int:
    """Scores of one document of `tokens` tokens: each query with itself and every token to which it attends."""
    far = max(0, tokens - (tokens if window is None else window))  # queries that do not reach the first token
    near = tokens - far
    return near * (near + 1) // 2 + far * near


def ring_steps(tokens: int, ranks: int, window: int | None) -> tuple[int, ...]:
    """Steps of a ring of context-parallel ranks in which any rank has scores; at step t each rank has the keys of the
    rank t places before it.

    For a sequence of `tokens` tokens in zigzag order: rank j has chunks j and 2 ranks - 1 - j of 2 ranks chunks.
    """
    if window is None or ranks == 1:
        return tuple(range(ranks))
    chunks = 2 * ranks
    reach = 1 + max(0, window - 2) // (tokens // chunks)  # how many chunks back a query may attend to a key
    owners = [min(chunk, chunks - 1 - chunk) for chunk in range(chunks)]
    apart = {(owners[q] - owners[k]) % ranks for q in range(chunks) for k in range(max(0, q - reach), q)}
    return tuple(sorted({0, *apart}))
