"""Device memory of the rounding buffers as the solver sees it: the layout of `memo.spec.slots` without alignment.

What a group adds to the buffers grows with the share of it that moves, but for qkv: attention reads q, k and v of all
tokens at once, so the first tile that moves costs room for all tiles in every slot, and saves the workspace.
"""

from collections.abc import Mapping

from memo.config import ModelConfig
from memo.planner.problem import SwapGroup
from memo.spec.skeleton import LayerBytes, skeletal_tensors
from memo.spec.slots import WHOLE_GROUP, SlotDims, plan_slot


def fixed_buffer_bytes(model: ModelConfig, dims: SlotDims, num_slots: int) -> int:
    """Where nothing moves in part: what always moves in every slot, and one workspace for qkv."""
    return _buffer_bytes(model, dims, num_slots, {})


def swap_groups(
    model: ModelConfig, dims: SlotDims, num_slots: int, sizes: LayerBytes, recompute_s: Mapping[str, float]
) -> tuple[SwapGroup, ...]:
    """The groups that may move, each with the seconds that rebuild all of it (by group, 0 where absent).

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
