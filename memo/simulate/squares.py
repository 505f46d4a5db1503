"""The cost of attention by torch's operations, one square of the scores at a time (memo.attention.squares)."""

import math

from memo.simulate.layer_shape import LayerShape
from memo.spec.attention_workspace import square_tokens

_PRODUCTS = (2, 5)
"""Products of a square in forward and in backward, which computes its scores again."""
_PASSES, _PASSES_OF_CAPS = (11, 21), (4, 13)
"""Passes over the wide scores of a square, and those more where they are capped. A read or a write is a pass, and that
of a narrow copy half of one."""
_KERNELS = (20, 35)
"""Kernels of a square. Known error: the host's time does not count them; squares are large where attention takes
long."""


def squares_s(shape: LayerShape, pairs: float, backward: bool) -> float:
    """Return the seconds of a rank with `pairs` causal pairs of a query and a key for each head and sequence."""
    config, kernels = shape.config, shape.kernels
    # The strips of a window are sequences of one call (memo.attention.core).
    length = shape.window or config.data.seq_length
    heads = config.training.micro_batch_size * shape.q / config.model.head_dim
    together = heads * max(1.0, config.data.seq_length / config.parallel.cp / length)
    side = square_tokens(math.ceil(together))
    # A triangle is computed in squares: half a square a row is left over.
    squares = pairs * (1 + min(side, length) / length) / side**2 * heads / together
    passes = _PASSES[backward] + (_PASSES_OF_CAPS[backward] if config.model.attn_logit_softcapping else 0)
    product_s = kernels.matmul_s(together * side, side, config.model.head_dim)
    moving_s = kernels.memory_s(passes * kernels.wide * together * side**2, _KERNELS[backward])
    return squares * (_PRODUCTS[backward] * product_s + moving_s)
