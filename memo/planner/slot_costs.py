"""Device memory of the rounding buffers as the solver sees it.

    slot       | always | moved part of residual, fc1, ... | qkv, all of it, as soon as a tile moves |   x num_slots
    workspace  | qkv, when none of it moves |                                                            x 1

`memo.executor.slots` lays the slots out; both agree to the byte but for its alignment (512 bytes a tensor).
"""

from collections.abc import Mapping

from memo.planner.problem import SwapGroup
from memo.spec.skeleton import LayerBytes


def fixed_buffer_bytes(sizes: LayerBytes, num_slots: int) -> int:
    """Where nothing moves in part: what always moves in every slot, and one workspace for qkv."""
    return num_slots * sum(sizes.always.values()) + sizes.groups["qkv"]


def swap_groups(sizes: LayerBytes, recompute_s: Mapping[str, float], num_slots: int) -> tuple[SwapGroup, ...]:
    """The groups that may move, each with the seconds that rebuild all of it (by group, 0 where absent).

    Attention reads q, k and v of all tokens at once: the first tile of qkv that moves costs room for all
    tiles in every slot, and saves the workspace.
    """
    return tuple(
        SwapGroup(name, num_bytes, recompute_s.get(name, 0.0), 0, entry_bytes=(num_slots - 1) * num_bytes)
        if name == "qkv"
        else SwapGroup(name, num_bytes, recompute_s.get(name, 0.0), buffer_bytes=num_slots * num_bytes)
        for name, num_bytes in sizes.groups.items()
    )
