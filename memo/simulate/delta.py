"""The cost of a gated delta net on one rank (memo.attention.delta_rule), from its products and the bytes that it moves.

torch computes the products in fp32. All values that a group of tokens holds at its peak (memo.spec.delta) are assumed
to be written and read once. A backward runs the forward twice more: once for the carries before each group, and once
under an autograd graph. Known error: TIMES was fitted to a single measured step, and no other step checks it.

The kernels of flash-linear-attention (fla) take the time that was published for them, and its convolution takes the
time of the bytes that it moves. Known error: memo has not measured either, and on other GPUs than the published one
the time is scaled by the bandwidth of memory.
"""

import math

from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles
from memo.simulate.cost import Cost
from memo.simulate.layer_shape import LayerShape
from memo.spec.delta import CHUNK, group_elements, group_tokens

TIMES = 2.7
"""Measured time divided by the time that products and bytes alone would take. Fitted to a step of Qwen3.5-4B with LoRA
on an H200, with one sequence of 32K tokens (benchmarks/gpu_accuracy.py). torch's triangular solves are near neither
limit."""
GROUP_KERNELS = (101, 276)
"""Kernels of a group of tokens in forward and in backward, counted on the emulated GPU. Kernels of chunks count
separately, and so does the forward of all groups but the last, which a backward runs for the carries."""
CHUNK_KERNELS = (1, 2)
"""Kernels of a chunk in forward and in backward, counted on the emulated GPU."""

FLA_GROUP_KERNELS = (28, 72)
"""GROUP_KERNELS of fla, whose kernels compute all chunks: operations of torch and launches of Triton in version 0.6,
counted without a GPU."""
_FLA_PASSES = ((29, 2), (87, 8))
"""In forward and backward, the passes over the values of each head in 16 bits that take as long as the rule on an H200,
and passes of the convolution over all channels: its backward runs forward again, and reads a gradient once a tap.
Version 0.5.1 takes 1.89 and 5.70 ms for 32,768 tokens with 32 heads of values and 16 of keys, all of size 128
(QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt; memory at 0.85 of 4.8 TB/s)."""


def delta_cost(shape: LayerShape, backward: bool) -> Cost:
    """Return the cost on one rank; cp ranks have all tokens of some heads, as much work as all heads of some tokens."""
    kernels, d, is_fla = shape.kernels, shape.config.model.head_dim, shape.config.hardware.delta_backend == "fla"
    heads = shape.tokens * shape.q / d
    channels, mixed = d + 2 * d * shape.kv / shape.q, kernels.narrow < kernels.wide
    if is_fla:
        moved = [(d * rule + channels * each) * kernels.narrow for rule, each in _FLA_PASSES]
    else:
        moved = [2 * group_elements(d, channels, each, mixed) * kernels.wide for each in (False, True)]
    num_bytes = heads * (2 * moved[0] + moved[1] if backward else moved[0])
    moving_s = kernels.memory_s(num_bytes, kernels_of_delta(shape.config, backward))
    if is_fla:
        return Cost(attention=moving_s)
    flops = heads * d * (10 * CHUNK + 6 * d + 2 * d * d / CHUNK) * (4 if backward else 1)
    peaks = kernels.hardware.peak_tflops  # the peak of the run's dtype stands in where that of fp32 is not known
    peak = peaks.get("fp32", peaks[kernels.dtype]) * 1e12 * kernels.hardware.efficiency.matmul
    return Cost(attention=TIMES * flops / peak, elementwise=TIMES * moving_s)


def kernels_of_delta(config: RunConfig, backward: bool) -> int:
    """Return the kernels for all tokens of a sequence: in one call or, where layers are swept, in one call a tile."""
    tokens, parallel = config.data.seq_length, config.parallel  # ranks of cp have all tokens of some heads
    heads = config.model.num_attention_heads // (parallel.tp * parallel.cp)
    calls = resolved_offload_tiles(config) if config.memory.sweeps else 1
    groups = math.ceil(tokens / calls / group_tokens(heads, config.training.micro_batch_size))
    chunks = math.ceil(tokens / calls / CHUNK)
    is_fla = config.hardware.delta_backend == "fla"
    of_groups, of_chunks = (FLA_GROUP_KERNELS, (0, 0)) if is_fla else (GROUP_KERNELS, CHUNK_KERNELS)
    forward, back = (of * groups + each * chunks for of, each in zip(of_groups, of_chunks, strict=True))
    return calls * (back + forward * (groups - 1) // groups if backward else forward)
