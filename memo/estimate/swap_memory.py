"""Memory of the layers under a swap plan, in closed form: rounding buffers, host records, working set.

    device     num_slots x slot  +  one workspace for qkv if none of it moves  +  working set of one layer
    host       the moved prefix of a slot, once for each layer and microbatch that lies in host memory

Sources: memo.spec.slots (layout, to the byte), memo.executor.layer (working set), memo.planner.swap (records).
Known error: none for slots. Host records are exact for one stage and for the last stage of plain 1F1B, and elsewhere at
most one too many. The working set is an upper bound of what exists at once and was not measured on GPUs.
"""

from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_dtype, resolved_offload_tiles
from memo.spec.layer_ops import layers_in_flight
from memo.spec.slots import Moved, SlotLayout, slot_layout
from memo.units import DTYPE_BYTES


@dataclass(frozen=True)
class SwapBytes:
    """Bytes of one rank of one stage."""

    rounding_buffers: int
    host: int


def swap_bytes(config: RunConfig, world_size: int, stage: int, moved: Moved) -> SwapBytes:
    """Device and host bytes of a rank of `stage`."""
    return laid_out_bytes(config, world_size, stage, slot_layout(config, moved))


def laid_out_bytes(config: RunConfig, world_size: int, stage: int, layout: SlotLayout) -> SwapBytes:
    """The same for a layout that is known, which all stages share."""
    passes = layers_in_flight(config, num_microbatches(config, world_size), stage)
    slots = min(2, passes)
    records = num_records(config, world_size, stage)
    return SwapBytes(layout.buffer_bytes(slots), records * layout.moved_bytes)


def num_records(config: RunConfig, world_size: int, stage: int) -> int:
    """Number of host records in use at once, each of one layer and microbatch.

    Everything in flight has one, except the last one or two, which are still in their slots: two if a backward directly
    follows its forward (with one stage, or on the last stage of plain 1F1B), else one.
    """
    parallel = config.parallel
    passes = layers_in_flight(config, num_microbatches(config, world_size), stage)
    turns_at_once = stage == parallel.pp - 1 and parallel.vpp == 1
    resident = 2 if turns_at_once or passes <= 2 else 1
    return max(0, passes - resident)


def working_set_bytes(config: RunConfig) -> int:
    """Bytes of a layer's backward in addition to the slots.

    These are the gradients of input, residual and attention's output, and the larger of two: dq, dk and dv with
    attention's fp32 sums, or one tile of the MLP with its activations, their gradients and one weight's gradient.
    """
    model, parallel = config.model, config.parallel
    narrow = DTYPE_BYTES[resolved_dtype(config, config.hardware.device)]
    wide = max(4, narrow)
    tokens = config.data.seq_length // parallel.cp * config.training.micro_batch_size
    q_size, kv_size = model.num_attention_heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    fc1 = model.ffn_size * (2 if model.gated else 1)
    attention = narrow * (q_size + kv_size) + wide * q_size  # gradients, and the kernel's sums for q
    if parallel.cp > 1:
        attention += 2 * narrow * kv_size + 3 * wide * kv_size  # K/V held and being received, and their gradients
    if model.qk_layernorm:
        attention += narrow * (q_size + kv_size)  # heads after their norm
    tile_tokens = tokens // resolved_offload_tiles(config)
    gathered = 3 * narrow * model.hidden_size  # normed input, its gradient, the output's gradient
    tile = tile_tokens * (gathered + narrow * (2 * fc1 + 3 * model.ffn_size) // parallel.tp)
    tile += narrow * model.hidden_size * fc1 // parallel.tp
    shared = tokens * narrow * (3 * model.hidden_size + q_size) // parallel.tp
    return shared + max(tokens * attention // parallel.tp, tile)
