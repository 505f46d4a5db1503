"""Builds the `SwapProblem` of a run, which the solver gets; no other module does.

Device memory of the rounding buffers is that of the layout of `memo.spec.slots` without alignment. The memory that a
group adds to the buffers is proportional to the share of it that moves, except for qkv. Attention reads q, k and v of
all tokens at once, so as soon as one tile of qkv moves, every slot needs space for all its tiles, and the workspace is
not needed.

Where layers are swept, "layer" here means one section of a layer, and keys and values always move.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_sections
from memo.estimate.memory_account import memory_account
from memo.estimate.swap_memory import NOTHING_BESIDE, BesideSlots
from memo.planner.problem import KEY_VALUE, Link, SwapGroup, SwapProblem
from memo.spec.disk import NO_RECORDS, Disk, RecordKind
from memo.spec.skeleton import LayerBytes, layer_bytes
from memo.spec.slots import NEEDS_FULL_ROOM, slot_dims
from memo.spec.stack import attending_layers
from memo.spec.sweep import key_value_layout, key_value_records


class ActivationLimits(NamedTuple):
    """Bytes that the activations of one rank may take, as in `SwapProblem`; by default none is known."""

    device_bytes: int = sys.maxsize
    host_bytes: int = sys.maxsize
    resident_bytes: int | None = None
    disk: Disk | None = None


NO_LIMITS = ActivationLimits()


def activation_limits(
    config: RunConfig, world_size: int, stage: int, device_bytes: int, host_bytes: int, disk: Disk | None = None
) -> ActivationLimits:
    """The limits of a rank of pipeline stage `stage`; `device_bytes`, `host_bytes`: memory that its states leave free.

    Known error: the device memory of a swap plan besides its rounding buffers is that of a plan that moves as little as
    possible and so recomputes most; a plan that recomputes less may need less.
    """
    plain = replace(config, memory=replace(config.memory, offload_alpha="off"))
    stays, swapped = memory_account(plain, world_size, stage), memory_account(config, world_size, stage, moved={})
    beside = swapped.activations - swapped.rounding_buffers
    return ActivationLimits(max(0, device_bytes - beside), max(0, host_bytes), stays.activations - beside, disk)


def swap_problem(
    config: RunConfig,
    world_size: int,
    *,
    num_slots: int,
    num_moves: int,
    num_records: int,
    forward_s: float,
    backward_s: float,
    longer_s: float = 0.0,
    recompute_s: Mapping[str, float],
    offload: Link,
    prefetch: Link,
    limits: ActivationLimits = NO_LIMITS,
    beside: BesideSlots = NOTHING_BESIDE,
) -> SwapProblem:
    """The problem of one rank, from counts of its swap plan, and times of one layer and of the link.

    Times are modelled or measured.

    Args:
        config: its device decides the dtype if the configuration names none.
        forward_s, backward_s, longer_s: seconds of a whole layer, as in `SwapProblem`.
        recompute_s: {group of `memo.spec.skeleton`: seconds to recompute all of it in a whole layer}.
    """
    memory, dims, sections = config.memory, slot_dims(config), resolved_sections(config)
    sizes = layer_bytes(config.model, dims, memory.offload_policy)
    always, fixed_bytes = sizes.always, fixed_buffer_bytes(sizes, num_slots)
    keys, input_bytes = NO_RECORDS, sizes.always["input"]
    if memory.sweeps:
        layout = key_value_layout(config)
        share = len(attending_layers(config.model)) / config.model.num_layers
        always, fixed_bytes = always | {KEY_VALUE: int(layout.part_bytes * share)}, fixed_bytes + layout.device_bytes
        fixed_bytes += (beside.input_sections + beside.hidden_sections) * input_bytes
        keys = key_value_records(beside.key_records, layout)
    recompute_s = {group: seconds / sections for group, seconds in recompute_s.items()}
    return SwapProblem(
        policy=memory.offload_policy,
        tiles=dims.tiles,
        always=always,
        groups=swap_groups(sizes, num_slots, recompute_s),
        never=sizes.never,
        forward_s=forward_s / sections,
        backward_s=backward_s / sections,
        longer_s=longer_s / sections,
        offload=offload,
        prefetch=prefetch,
        num_passes=config.model.num_layers // config.parallel.pp * num_microbatches(config, world_size) * sections,
        num_moves=num_moves,
        num_records=num_records,
        host_bytes=limits.host_bytes,
        device_bytes=limits.device_bytes,
        fixed_buffer_bytes=fixed_bytes,
        resident_bytes=limits.resident_bytes,
        sections=sections,
        keys=keys,
        inputs=RecordKind(beside.input_records, input_bytes),
        hidden=RecordKind(beside.hidden_records, input_bytes if beside.hidden_records else 0),
        disk=limits.disk,
    )


def swap_groups(sizes: LayerBytes, num_slots: int, recompute_s: Mapping[str, float]) -> tuple[SwapGroup, ...]:
    """The groups that may move, each with the seconds to recompute all of it (`recompute_s`, 0 for absent groups).

    Args:
        sizes: bytes of one layer; its groups are those that the policy may move.
    """
    groups = []
    for name, num_bytes in sizes.groups.items():
        in_slots = num_slots * num_bytes
        gradual, entry = (0, in_slots - num_bytes) if name == NEEDS_FULL_ROOM else (in_slots, 0)
        groups.append(SwapGroup(name, num_bytes, recompute_s.get(name, 0.0), gradual, entry))
    return tuple(groups)


def fixed_buffer_bytes(sizes: LayerBytes, num_slots: int) -> int:
    """Bytes of the buffers if no group moves: every slot has room for the tensors that always move, and there is one
    workspace for qkv."""
    return num_slots * sum(sizes.always.values()) + sizes.groups[NEEDS_FULL_ROOM]
