"""Sliding-window attention: a query attends to the last W tokens of its document, itself included.

The tokens of a document are taken in strips of W tokens. A query attends to the keys of its own strip that are not
after it, and to those of the strip before that are less than W tokens back: two triangles, which together have just the
scores that the window leaves (memo.attention.blocks). Strips alike are the sequences of one kernel call.
"""

_CALL_TOKENS = 1 << 16
"""With so many tokens a kernel uses a device in full, and what it makes is soon freed."""
_CALL_STRIPS = 1024
"""More strips would be more programs than one axis of a grid takes, with as many heads as models have."""


def strips_of_calls(strips: int, apart: int, most_tokens: int) -> list[int]:
    """How many of `strips` alike each kernel call takes, all within reach (`most_tokens`) of the first one.

    They begin `apart` tokens apart, which is a window or more.
    """
    at_once = max(1, min(_CALL_STRIPS, min(_CALL_TOKENS, most_tokens) // apart))
    whole, rest = divmod(strips, at_once)
    return [at_once] * whole + [rest] * bool(rest)


def attended_pairs(tokens: int, window: int | None) -> int:
    """Scores of one document of so many tokens, each query with itself and every token that it attends to."""
    far = max(0, tokens - (tokens if window is None else window))  # queries that do not reach the first token
    near = tokens - far
    return near * (near + 1) // 2 + far * near
