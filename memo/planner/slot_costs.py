"""Device memory of the rounding buffers for the solver: the layout of `memo.spec.slots` without alignment.

The memory that a group adds to the buffers is proportional to the share of it that moves, except for qkv. Attention
reads q, k and v of all tokens at once, so as soon as one tile of qkv moves, every slot needs space for all its tiles,
and the workspace is not needed.
"""

from collections.abc import Mapping

from memo.config import ModelConfig
from memo.planner.problem import SwapGroup
from memo.spec.skeleton import LayerBytes, skeletal_tensors
from memo.spec.slots import WHOLE_GROUP, SlotDims, plan_slot


def fixed_buffer_bytes(model: ModelConfig, dims: SlotDims, num_slots: int) -> int:
    """Bytes if only what always moves does: space for it in every slot, and one workspace for qkv."""
    return _buffer_bytes(model, dims, num_slots, {})


def swap_groups(
    model: ModelConfig, dims: SlotDims, num_slots: int, sizes: LayerBytes, recompute_s: Mapping[str, float]
) -> tuple[SwapGroup, ...]:
    """The groups that may move, each with the seconds to recompute all of it (`recompute_s`, 0 for absent groups).

    Args:
        sizes: of one layer of `model` under `dims`; its groups are those that the policy may move.
    """
    fixed = _buffer_bytes(model, dims, num_slots, {})
    groups = []
    for name, num_bytes in sizes.groups.items():
        added = _buffer_bytes(model, dims, num_slots, {name: dims.tiles}) - fixed
        entry, gradual = (added, 0) if name == WHOLE_GROUP else (0, added)
        groups.append(SwapGroup(name, num_bytes, recompute_s.get(name, 0.0), gradual, entry))
    return tuple(groups)


def _buffer_bytes(model: ModelConfig, dims: SlotDims, num_slots: int, tiles: Mapping[str, int]) -> int:
    return plan_slot(skeletal_tensors(model), dims, tiles, alignment_bytes=1).buffer_bytes(num_slots)
