"""Memory of one rank of memo's own program, by the components of memo.estimate.rank_memory, Megatron-LM's.

What torch's allocator is asked for is counted request by request (memo.estimate.program), so nothing is fitted:

    weights .. state_slots   states, where the placement puts them
    rounding_buffers         slots of a swap plan
    skeletal                 what layers keep between forward and backward, but for the one at work
    transient                the rest of what lives at the worst moment of a step, cuBLAS's workspace with it
    context                  what torch does not see: CUDA's context, NCCL's buffers, cuDNN's workspace; on a CPU the
                             process, messages between processes, and what malloc keeps of freed memory

Known error: allocated bytes within 0.3 % on the emulated GPU (benchmarks/full_size.py, docs/memory.md), where cuDNN's
workspaces do not show. context was not measured. What the allocator reserves beyond this depends on which it is
(docs/memory.md): with a plan of memo's 13 to 51 MiB, foreseen within 1.3 % of all it reserves (reserved_under_plan);
with expandable_segments alone 1 to 5 %, by default up to 20 %. On a CPU the total is 1.00 to 1.19 times the peak
resident set of a rank, measured in 20 runs with torch 2.13: GPT, GPT-2, Llama and Qwen3, fp32, fp64 and bf16, 15 MiB to
3 GiB of tensors, alone and with tp, cp, pp or dp of 2; allocated bytes: memo.estimate.program.memory.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import num_microbatches
from memo.estimate.program.bounds import memory_bounds
from memo.estimate.program.memory import program_memory
from memo.estimate.rank_memory import RankMemory
from memo.estimate.swap_memory import swap_bytes
from memo.spec.layer_ops import layers_in_flight
from memo.spec.slots import Moved
from memo.spec.torch_segments import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from memo.units import MIB

RUNTIME_BYTES = {"cpu": 352 * MIB, "cuda": 1024 * MIB}
"""cpu: resident set of a trainer before its first step (torch 2.13); cuda: assumed, not measured."""

_FIRST_STEP_BYTES = 88 * MIB
_MESSAGES_BYTES = 90 * MIB
_KEPT_SHARE = 0.25
"""Measured on a CPU: what the first step loads, what gloo takes with other ranks, and what malloc rounds up, keeps and
cuts in pieces, of what torch allocates."""


def own_memory(config: RunConfig, world_size: int, stage: int, *, moved: Moved | None = None) -> RankMemory:
    """Peak of the worst rank of pipeline stage `stage`, from the second step on.

    Args:
        config: checked, with a vocabulary; --device auto counts as cpu.
        moved: what a swap plan moves; default: a number in --offload-alpha. auto without it counts as off.
    """
    config, moved = _moving(config, moved)
    program = program_memory(config, world_size, stage, moved)
    states = program.states
    kept = (layers_in_flight(config, num_microbatches(config, world_size), stage) - 1) * program.kept_bytes
    host = 0 if moved is None else swap_bytes(config, world_size, stage, moved).host
    is_cuda = config.hardware.device == "cuda"
    return RankMemory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.masters + states.moments,
        state_slots=states.slots + states.staging,
        skeletal=kept,
        rounding_buffers=program.rounding_buffers,
        transient=program.moment_bytes - kept,
        communication=0,
        context=RUNTIME_BYTES["cuda"] if is_cuda else cpu_context_bytes(program.total, world_size),
        host=host + states.host,
    )


def cpu_context_bytes(allocated_bytes: int, world_size: int) -> int:
    """What a process on a CPU takes beside what torch allocates."""
    messages = _MESSAGES_BYTES if world_size > 1 else 0
    return RUNTIME_BYTES["cpu"] + _FIRST_STEP_BYTES + messages + math.ceil(_KEPT_SHARE * allocated_bytes)


class ActivationBytes(NamedTuple):
    """What activations of one rank take of its device: what a swap plan is made from.

    Attributes:
        beside: under a swap plan, beside its rounding buffers.
        resident: beyond `beside`, where everything stays.
    """

    beside: int
    resident: int


def activation_bytes(config: RunConfig, world_size: int, stage: int) -> ActivationBytes:
    """Of the worst rank of pipeline stage `stage`; arguments as of `own_memory`.

    Known error: `beside` is counted where nothing moves but what always does; what the recomputation of less takes may
    be less.
    """
    plain = replace(config, memory=replace(config.memory, offload_alpha="off"))
    stays, swapped = own_memory(plain, world_size, stage), own_memory(config, world_size, stage, moved={})
    beside = swapped.activations - swapped.rounding_buffers
    return ActivationBytes(beside, stays.activations - beside)


def reserved_under_plan(memory: RankMemory) -> int:
    """What torch's allocator takes of the device for `memory` under a plan of memo's, beside which its segments are
    expandable.

    It takes whole pages, and a page stays while any block lies in it. So the end of a run of large blocks leaves a part
    of a page unused, and there are several: what was made before the plan, around what recording it has left, and then
    the plan's block. That was 1 to 3 pages at full size, and small blocks, of which the account has no more than their
    sum, took 1 to 9 of theirs: two of each are foreseen, the first of the large ones by rounding up.
    """
    num_large = math.ceil(memory.allocated / LARGE_SEGMENT_BYTES) + 1
    return num_large * LARGE_SEGMENT_BYTES + 2 * SMALL_SEGMENT_BYTES


@dataclass(frozen=True)
class OwnBounds:
    """Of one stage: its components at least, and its total at most."""

    least: RankMemory
    most: int


def worst_stages(config: RunConfig) -> list[int]:
    """One of them is the worst: the first stage has most in flight, the second nearly as much and also hidden states
    that it receives and gradients that it sends, the last one the head."""
    last = config.parallel.pp - 1
    return sorted({0, min(1, last), last})


def own_bounds(config: RunConfig, world_size: int, stage: int, *, moved: Moved | None = None) -> OwnBounds:
    """Between what `own_memory` lies on GPUs, at a twentieth of its cost; arguments as there."""
    config, moved = _moving(config, moved)
    bounds, context = memory_bounds(config, world_size, stage, moved), RUNTIME_BYTES["cuda"]
    states, kept = bounds.states, bounds.kept
    host = 0 if moved is None else swap_bytes(config, world_size, stage, moved).host
    least = RankMemory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        state_slots=states.slots + states.staging,
        skeletal=kept,
        rounding_buffers=bounds.rounding_buffers,
        transient=bounds.least - states.device - bounds.rounding_buffers - kept,
        communication=0,
        context=context,
        host=host + states.host,
    )
    return OwnBounds(least, bounds.most + context)


def _moving(config: RunConfig, moved: Moved | None) -> tuple[RunConfig, Moved | None]:
    """With --offload-alpha off where nothing is known to move, and what moves where it is given."""
    if moved is not None or not config.memory.swaps:
        return config, moved
    if isinstance(config.memory.offload_alpha, str):
        return replace(config, memory=replace(config.memory, offload_alpha="off")), None
    return config, float(config.memory.offload_alpha)
