"""What a gated delta net costs on one rank (memo.attention.delta_rule), by its products and by the bytes that it moves.

torch's products are in fp32. What a group of tokens has at its peak (memo.spec.delta) is taken to be written and read
once. A backward runs the forward again twice: for the carries before each group, and under a graph. Known error: the
one step that was measured chose TIMES, and none checks it.

flash-linear-attention's kernels (fla) take as long as others measured them to, and its convolution as long as the bytes
that it moves. Known error: no measurement of memo's checks it, and on GPUs other than the one that was measured they
are taken to be as much faster as memory is.
"""

import math

from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles
from memo.simulate.cost import Cost
from memo.simulate.layer_shape import LayerShape
from memo.spec.delta import CHUNK, group_elements, group_tokens

TIMES = 2.9
"""Times as long as products and bytes alone would take: chosen by a step of Qwen3.5-4B with LoRA, one sequence of 32K
tokens, on an H200 (benchmarks/gpu_accuracy.py). torch's triangular solves are not near either limit."""
GROUP_KERNELS = (101, 276)
"""Of a group of tokens, beside those of its chunks: in forward, and in backward beside the forward of all groups but
the last, which runs for the carries; counted on the emulated GPU."""
CHUNK_KERNELS = (1, 2)

FLA_GROUP_KERNELS = (28, 72)
"""As GROUP_KERNELS, of fla, whose kernels compute all chunks; operations of torch and launches of Triton in version
0.6, counted without a GPU."""
_FLA_PASSES = (29, 87)
"""How often the rule would have to read or write the values of each head in 16 bits, forward and backward, to take as
long as it does on an H200: 1.89 and 5.70 ms, of version 0.5.1, for 32,768 tokens of 32 heads of values and 16 of keys,
of 128 each (QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt; memory at 0.85 of 4.8 TB/s)."""
_FLA_CONVOLUTION_PASSES = (2, 8)
"""As often does the convolution all channels: in backward it runs forward again, and reads a gradient once a tap."""


def delta_cost(shape: LayerShape, backward: bool) -> Cost:
    """Of all tokens of some heads, as many as all heads of some tokens."""
    kernels, d = shape.kernels, shape.config.model.head_dim
    heads = shape.tokens * shape.q / d
    channels, mixed = d + 2 * d * shape.kv / shape.q, kernels.narrow < kernels.wide
    if shape.config.hardware.delta_backend == "fla":
        passes = [d * rule + channels * moved for rule, moved in zip(_FLA_PASSES, _FLA_CONVOLUTION_PASSES, strict=True)]
        num_bytes = heads * kernels.narrow * (2 * passes[0] + passes[1] if backward else passes[0])
        return Cost(attention=kernels.memory_s(num_bytes, kernels_of_delta(shape.config, backward)))
    forward, back = (group_elements(d, channels, each, mixed) for each in (False, True))
    num_bytes = 2 * heads * (2 * forward + back if backward else forward) * kernels.wide
    flops = heads * d * (10 * CHUNK + 6 * d + 2 * d * d / CHUNK) * (4 if backward else 1)
    peaks = kernels.hardware.peak_tflops  # in the dtype of the run, if no other is known
    peak = peaks.get("fp32", peaks[kernels.dtype]) * 1e12 * kernels.hardware.efficiency.matmul
    moving_s = kernels.memory_s(num_bytes, kernels_of_delta(shape.config, backward))
    return Cost(attention=TIMES * flops / peak, elementwise=TIMES * moving_s)


def kernels_of_delta(config: RunConfig, backward: bool) -> int:
    """Of all tokens of a sequence, in one call or, where layers are swept, in one for each tile."""
    tokens, parallel = config.data.seq_length, config.parallel  # ranks of cp have all tokens of some heads
    heads = config.model.num_attention_heads // (parallel.tp * parallel.cp)
    calls = resolved_offload_tiles(config) if config.memory.sweeps else 1
    groups = math.ceil(tokens / calls / group_tokens(heads, config.training.micro_batch_size))
    chunks = math.ceil(tokens / calls / CHUNK)
    of_groups, of_chunks = GROUP_KERNELS, CHUNK_KERNELS
    if config.hardware.delta_backend == "fla":
        of_groups, of_chunks = FLA_GROUP_KERNELS, (0, 0)
    forward, back = (of * groups + each * chunks for of, each in zip(of_groups, of_chunks, strict=True))
    return calls * (back + forward * (groups - 1) // groups if backward else forward)
