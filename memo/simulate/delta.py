"""What a gated delta net costs on one rank (memo.attention.delta_rule), by its products and by the bytes that it moves.

Its products are in fp32. What a group of tokens has at its peak (memo.spec.delta) is taken to be written and read once.
A backward runs the forward again twice: for the carries before each group, and under a graph. Known error: not compared
with a measurement; kernels that do all of it in one, such as fla's, take a small part of this.
"""

from memo.config import RunConfig
from memo.simulate.cost import Cost
from memo.simulate.layer_shape import LayerShape
from memo.spec.delta import CHUNK, group_elements, group_tokens

GROUP_KERNELS = (101, 377)
"""Of a group of tokens, in forward and backward, beside those of its chunks; counted on the emulated GPU."""
CHUNK_KERNELS = (1, 3)


def delta_cost(shape: LayerShape, backward: bool) -> Cost:
    """Of all tokens of some heads, as many as all heads of some tokens."""
    kernels, d = shape.kernels, shape.config.model.head_dim
    heads = shape.tokens * shape.q / d
    channels, mixed = d + 2 * d * shape.kv / shape.q, kernels.narrow < kernels.wide
    forward, back = (group_elements(d, channels, each, mixed) for each in (False, True))
    num_bytes = 2 * heads * (2 * forward + back if backward else forward) * kernels.wide
    flops = heads * d * (10 * CHUNK + 6 * d + 2 * d * d / CHUNK) * (4 if backward else 1)
    peaks = kernels.hardware.peak_tflops  # in the dtype of the run, if no other is known
    peak = peaks.get("fp32", peaks[kernels.dtype]) * 1e12 * kernels.hardware.efficiency.matmul
    moving_s = kernels.memory_s(num_bytes, kernels_of_delta(shape.config, backward))
    return Cost(attention=flops / peak, elementwise=moving_s)


def kernels_of_delta(config: RunConfig, backward: bool) -> int:
    tokens, parallel = config.data.seq_length, config.parallel  # ranks of cp have all tokens of some heads
    heads = config.model.num_attention_heads // (parallel.tp * parallel.cp)
    group = group_tokens(heads, config.training.micro_batch_size)
    return int(tokens / group * GROUP_KERNELS[backward] + tokens / CHUNK * CHUNK_KERNELS[backward])
