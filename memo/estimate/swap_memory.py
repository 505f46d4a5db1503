"""Memory of the layers under a swap plan, in closed form: rounding buffers, host records, working set.

    slot       always: input, attention_out, lse | moved tiles of residual, fc1, ... | qkv: moved tiles, rest
               |<------------------ host record, one for each layer and microbatch away ------->|
    device     num_slots x slot  +  room for qkv where none of it moves  +  working set of one layer

Sources: memo.executor.slots (layout, to the byte), memo.executor.layer (working set), memo.planner.swap (records).
Known error: none for slots; host records are exact for one stage and for the last stage of plain 1F1B, elsewhere at
most one too many; the working set is a bound on what exists at once and was not measured on GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_dtype, resolved_offload_tiles
from memo.config.training import Dtype
from memo.estimate.memory import layers_in_flight
from memo.spec.skeleton import bytes_of, moves_in_part, skeletal_tensors
from memo.units import DTYPE_BYTES

SLOT_ALIGNMENT_BYTES = 512

Moved = float | Mapping[str, int]
"""What moves: one share of the tokens of every group, rounded down to tiles, or the number of tiles of each group."""


@dataclass(frozen=True)
class SlotBytes:
    """One layer: all of its slot, the prefix that moves, and the room for qkv that all slots share."""

    slot: int
    moved: int
    workspace: int


@dataclass(frozen=True)
class SwapBytes:
    """One rank of one stage."""

    rounding_buffers: int
    host: int


def swap_bytes(config: RunConfig, world_size: int, stage: int, moved: Moved) -> SwapBytes:
    """Device and host bytes of a rank of `stage`."""
    layout = slot_bytes(config, moved)
    passes = layers_in_flight(config, num_microbatches(config, world_size), stage)
    slots = min(2, passes)
    records = num_records(config, world_size, stage)
    return SwapBytes(slots * layout.slot + layout.workspace, records * layout.moved)


def num_records(config: RunConfig, world_size: int, stage: int) -> int:
    """Layers x microbatches away at once: all that are in flight but the last one or two, still in their slots.

    A backward that directly follows its forward (one stage, or the last of plain 1F1B) finds two layers in place.
    """
    parallel = config.parallel
    passes = layers_in_flight(config, num_microbatches(config, world_size), stage)
    turns_at_once = stage == parallel.pp - 1 and parallel.vpp == 1
    resident = 2 if turns_at_once or passes <= 2 else 1
    return max(0, passes - resident)


def slot_bytes(config: RunConfig, moved: Moved) -> SlotBytes:
    """The layout of one slot; groups that never move under the policy are not in it."""
    tiles = resolved_offload_tiles(config)
    policy, tp, dtype = config.memory.offload_policy, config.parallel.tp, _dtype(config)
    num_tokens = config.data.seq_length // config.parallel.cp * config.training.micro_batch_size
    tensors = skeletal_tensors(config.model)
    size = {tensor.name: bytes_of(tensor, num_tokens, tp, dtype) for tensor in tensors}
    end = 0
    for tensor in tensors:
        if tensor.kind == "always":
            end = _aligned(end) + size[tensor.name]
    for tensor in tensors:
        count = _moved_tiles(moved, tensor.group, tiles)
        if count and tensor.group != "qkv" and tensor.kind != "always" and moves_in_part(tensor, policy):
            end = _aligned(end) + size[tensor.name] * count // tiles
    count = _moved_tiles(moved, "qkv", tiles)
    if not count:
        return SlotBytes(end, end, size["qkv"])
    start = _aligned(end)
    return SlotBytes(start + size["qkv"], start + size["qkv"] * count // tiles, 0)


def working_set_bytes(config: RunConfig) -> int:
    """What a layer's backward holds beside the slots: the larger of attention and of one tile of the MLP.

    Gradients of input, residual and attention's output; then either dq, dk and dv with attention's fp32 sums, or
    the tile's activations, their gradients and one weight's gradient.
    """
    model, parallel = config.model, config.parallel
    narrow, wide = DTYPE_BYTES[_dtype(config)], max(4, DTYPE_BYTES[_dtype(config)])
    tokens = config.data.seq_length // parallel.cp * config.training.micro_batch_size
    q_size, kv_size = model.num_attention_heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    fc1 = model.ffn_size * (2 if model.gated else 1)
    attention = narrow * (q_size + kv_size) + wide * q_size  # gradients, and the kernel's sums for q
    if parallel.cp > 1:
        attention += 2 * narrow * kv_size + 3 * wide * kv_size  # K/V here and under way, their gradients
    if model.qk_layernorm:
        attention += narrow * (q_size + kv_size)  # heads after their norm
    tile_tokens = tokens // resolved_offload_tiles(config)
    gathered = 3 * narrow * model.hidden_size  # normed input, its gradient, the output's gradient
    tile = tile_tokens * (gathered + narrow * (2 * fc1 + 3 * model.ffn_size) // parallel.tp)
    tile += narrow * model.hidden_size * fc1 // parallel.tp
    shared = tokens * narrow * (3 * model.hidden_size + q_size) // parallel.tp
    return shared + max(tokens * attention // parallel.tp, tile)


def _moved_tiles(moved: Moved, group: str, tiles: int) -> int:
    return int(moved * tiles + 1e-9) if isinstance(moved, int | float) else moved.get(group, 0)


def _dtype(config: RunConfig) -> Dtype:
    return resolved_dtype(config, config.hardware.device)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
