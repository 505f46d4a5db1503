"""Sliding-window attention: a query attends to the last W tokens of its document, itself included.

The tokens of a document are taken in strips of W tokens. A query attends to the keys of its own strip that are not
after it, and to those of the strip before that are less than W tokens back: two triangles, which together have just the
scores that the window leaves (memo.attention.blocks). Strips alike are the sequences of one kernel call.
"""

_CALL_TOKENS = 1 << 16
_CALL_STRIPS = 1024
"""More strips would be more programs than one axis of a grid takes, with as many heads as models have."""


def strips_of_call(window: int) -> int:
    """Strips that one kernel call takes: with many tokens it uses a device in full, and what it makes is soon freed."""
    return max(1, min(_CALL_STRIPS, _CALL_TOKENS // window))


def attended_pairs(tokens: int, window: int | None) -> int:
    """Scores of one document of so many tokens, each query with itself and every token that it attends to."""
    far = max(0, tokens - (tokens if window is None else window))  # queries that do not reach the first token
    near = tokens - far
    return near * (near + 1) // 2 + far * near
