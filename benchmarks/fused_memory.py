"""Predicts the peak of torch's allocator on a rank of Megatron-LM with Transformer Engine. Nothing is fitted.

memo.estimate.rank_memory predicts Megatron-LM's memory for the runs of its calibration, whose kernels are not fused.
With Transformer Engine and --cross-entropy-loss-fusion,

    SwiGLU          is one kernel, so that silu(gate) is not kept beside the product
    cross entropy   writes the gradients of the logits over the logits, which stay in bf16
    matrices        add weight gradients to sums in fp32 within the product, and return a bf16 tensor to autograd that
                    nothing reads: one tensor for each shape of a layer's matrices, which is kept, and a new one for
                    the head

Known error: 0.8 % in the mean and 2.8 % at most on SimuMax's 31 runs of dense models on 8 B200
(benchmarks/held_out_accuracy.py); these three differences were found by these runs. Memory that the allocator reserves
without giving it out is not counted: 2 to 9 % in these runs.
"""

from memo.config import RunConfig
from memo.config.derived import rank_tokens, vocab_rows_per_rank
from memo.errors import ConfigError
from memo.estimate.rank_memory import (
    ends_bytes,
    hidden_bytes,
    layer_activation_bytes,
    rank_memory,
    shape_units,
)
from memo.estimate.state_memory import state_sizes
from memo.spec.layer_ops import layers_in_flight
from memo.spec.schedule import pipeline_of
from memo.spec.shapes import ModelShape

_NARROW_BYTES = 2
_LOGIT_BYTES = 2


def fused_allocated_bytes(config: RunConfig, shape: ModelShape, world_size: int) -> int:
    """Return the bytes of the rank that needs most; arguments are those of memo.estimate.rank_memory.worst_rank.

    Raises ConfigError for a run that recomputes or swaps, or is not in bf16.
    """
    memory, dtype = config.memory, config.training.params_dtype
    if memory.swaps or memory.recompute_granularity != "none" or dtype not in (None, "bf16"):
        raise ConfigError(
            f"fused kernels are counted in bf16 without recomputation and swapping, not for --params-dtype {dtype}, "
            f"--recompute-granularity {memory.recompute_granularity} and --offload-alpha {memory.offload_alpha}"
        )
    return max(_stage_bytes(config, shape, world_size, stage) for stage in {0, config.parallel.pp - 1})


def _stage_bytes(config: RunConfig, shape: ModelShape, world_size: int, stage: int) -> int:
    passes = layers_in_flight(pipeline_of(config, world_size), config.model.num_layers, stage)
    layer = layer_activation_bytes(config) - _silu_bytes(config)
    layer_backward = layer + 2 * hidden_bytes(config)  # its input and the input's gradient, gathered over tp
    states = rank_memory(config, shape, world_size, stage).states
    unread = _NARROW_BYTES * shape_units(config, shape, stage, state_sizes(config, world_size).shards).layer.numel
    return states + unread + passes * layer + ends_bytes(config) + max(layer_backward, _loss_bytes(config, stage))


def _silu_bytes(config: RunConfig) -> int:
    if not config.model.gated:
        return 0
    return rank_tokens(config) * _NARROW_BYTES * config.model.ffn_size // config.parallel.tp


def _loss_bytes(config: RunConfig, stage: int) -> int:
    """Return the bytes of logits, and in the head's backward of the tensor that nothing reads."""
    if stage != config.parallel.pp - 1:
        return 0
    rows = vocab_rows_per_rank(config.model.vocabulary, config.parallel.tp)
    return rows * (_LOGIT_BYTES * rank_tokens(config) + _NARROW_BYTES * config.model.hidden_size)
