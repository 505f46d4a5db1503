"""Memory of one rank of memo itself, in the components that memo.estimate.rank_memory uses for Megatron-LM.

Every request to torch's allocator is counted (memo.estimate.program), so nothing is fitted:

    weights .. state_slots   weights, gradients and optimizer states on the device, as the placement says
    rounding_buffers         slots of a swap plan
    skeletal                 tensors that layers keep between forward and backward, except the layer that runs
    transient                everything else that lives at the peak of a step, including cuBLAS's workspaces
    context                  memory that torch does not see (memo.estimate.unseen_memory); on a CPU the process,
                             messages between processes, and freed memory that malloc keeps

Known error: memo.estimate.memory_errors states the error of allocated bytes, on the emulated GPU
(benchmarks/full_size.py, docs/memory.md). The workspace of attention follows the sources of its kernels
(memo.spec.attention_workspace). context is taken from published figures, with a range. The allocator reserves more than
it allocates (docs/memory.md): under a memory plan some tens of MiB, and the reserved bytes are foreseen within 1.5 %
(reserved_under_plan); with expandable_segments alone 1 to 5 %; by default up to 20 %. On a CPU the total is 1.00 to
1.19 times the peak resident set of a rank, measured in 20 runs with torch 2.13: GPT, GPT-2, Llama and Qwen3, fp32, fp64
and bf16, 15 MiB to 3 GiB of tensors, alone and with tp, cp, pp or dp of 2. memo.estimate.program.memory states the
error of allocated bytes on CPUs.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from memo.config import RunConfig
from memo.estimate.program.memory import Program
from memo.estimate.rank_memory import RankMemory
from memo.estimate.unseen_memory import FAST_NODE, Links, page_table_bytes, unseen_memory
from memo.spec.layer_ops import layers_in_flight
from memo.spec.schedule import pipeline_of
from memo.spec.slots import Moved
from memo.spec.torch_segments import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from memo.units import MIB

PROCESS_BYTES = 352 * MIB
"""Resident set of a trainer on a CPU before its first step (torch 2.13)."""

_FIRST_STEP_BYTES = 88 * MIB
_MESSAGES_BYTES = 90 * MIB
_KEPT_SHARE = 0.25
"""Measured on a CPU, in this order: bytes that the first step loads, bytes that gloo takes if there are several ranks,
and the share of torch's bytes that malloc adds by rounding up, by keeping freed memory and by fragmentation."""


def memory_account(
    config: RunConfig, world_size: int, stage: int, *, moved: Moved | None = None, links: Links = FAST_NODE
) -> RankMemory:
    """Return the peak memory of the rank of pipeline stage `stage` that needs most, from the second step on.

    Args:
        config: a checked configuration with a vocabulary; --device auto counts as cpu.
        moved: what a swap plan moves; by default what a number in --offload-alpha moves. auto without `moved` counts
            as off.
        links: links between GPUs; they decide how much memory NCCL takes.
    """
    return own_memories(config, world_size, [stage], moved=moved, links=links)[stage]


def own_memories(
    config: RunConfig, world_size: int, stages: Iterable[int], *, moved: Moved | None = None, links: Links = FAST_NODE
) -> dict[int, RankMemory]:
    """Return `memory_account` of each of several stages; they share most of the counting."""
    program, is_gpu, found = _program(config, world_size, moved), config.hardware.device == "cuda", {}
    unseen = unseen_memory(config, world_size, links).foreseen if is_gpu else 0
    pipeline = pipeline_of(config, world_size)
    for stage in stages:
        states, swap = program.states(stage), program.swap(stage)
        allocated = states.device + swap.rounding_buffers + program.peak_bytes(stage)
        in_flight = layers_in_flight(pipeline, config.model.num_layers, stage)
        found[stage] = RankMemory(
            weights=states.weights,
            gradients=states.gradients,
            optimizer=states.optimizer,
            state_slots=states.slots + states.staging,
            skeletal=(kept := (in_flight - 1) * program.kept_bytes(stage)),
            rounding_buffers=swap.rounding_buffers,
            transient=allocated - states.device - swap.rounding_buffers - kept,
            communication=0,
            context=unseen + page_table_bytes(swap.host + states.host)
            if is_gpu
            else cpu_context_bytes(allocated, world_size),
            host=swap.host + states.host,
        )
    return found


def worst_ring_rank(config: RunConfig, world_size: int, stage: int) -> int:
    """Return the place in a ring of cp of the rank of a stage that needs most device memory, on GPUs."""
    return _program(config, world_size, None).worst_ring_rank(stage)


def _program(config: RunConfig, world_size: int, moved: Moved | None) -> Program:
    if moved is None and config.memory.swaps and config.memory.offload_alpha == "auto":  # nothing is chosen yet
        config = replace(config, memory=replace(config.memory, offload_alpha="off"))
    return Program(config, world_size, moved)


def possible_memory(config: RunConfig, world_size: int, stage: int, links: Links = FAST_NODE) -> list[RankMemory]:
    """Return what a rank may take: one `memory_account`, or two under --offload-alpha auto, which has not chosen yet.

    The first of the two has all activations on the device, the second has as few as possible there.
    """
    is_open = config.memory.swaps and config.memory.offload_alpha == "auto"
    choices: list[Moved | None] = [None, {}] if is_open else [None]
    return [memory_account(config, world_size, stage, moved=moved, links=links) for moved in choices]


def cpu_context_bytes(allocated_bytes: int, world_size: int) -> int:
    """Return the bytes of a process on a CPU in addition to the bytes that torch allocates."""
    messages = _MESSAGES_BYTES if world_size > 1 else 0
    return PROCESS_BYTES + _FIRST_STEP_BYTES + messages + math.ceil(_KEPT_SHARE * allocated_bytes)


LOST_PAGES_BYTES = 2 * LARGE_SEGMENT_BYTES + 2 * SMALL_SEGMENT_BYTES
"""Bytes that the allocator loses to partly filled pages under a memory plan: see `reserved_under_plan`. At full size 13
to 51 MiB were lost."""


def reserved_under_plan(memory: RankMemory) -> int:
    """Return the device bytes that torch's allocator reserves under a memory plan, with expandable segments.

    It reserves whole pages and keeps a page while any block lies in it, so each group of large blocks may leave part
    of its last page unused. At full size 1 to 3 pages of large blocks were lost in this way (tensors made before the
    plan, tensors left behind by recording the plan, the plan's own block). Small blocks took 1 to 9 pages; only the sum
    of their bytes is known. Two pages of each kind are foreseen; rounding up gives the first page of large blocks.
    """
    num_large = math.ceil(memory.allocated / LARGE_SEGMENT_BYTES) + 1
    return num_large * LARGE_SEGMENT_BYTES + 2 * SMALL_SEGMENT_BYTES


def device_bytes(config: RunConfig, world_size: int, stage: int, moved: Moved | None = None) -> int:
    """Return the bytes of a rank of `stage` that --device-memory-gib limits; arguments as in `memory_account`.

    On a GPU they include the memory that torch does not see. On a CPU they are the bytes requested from torch's
    allocator, without the process, host records and the states in the host arena.
    """
    return _on_device(config, memory_account(config, world_size, stage, moved=moved))


def worst_device_bytes(config: RunConfig, world_size: int) -> int:
    """Return the bytes of the rank that needs most, over all stages; under --offload-alpha auto its least bytes."""
    return max(
        min(_on_device(config, memory) for memory in possible_memory(config, world_size, stage))
        for stage in worst_stages(config)
    )


def _on_device(config: RunConfig, memory: RankMemory) -> int:
    return memory.total if config.hardware.device == "cuda" else memory.allocated


def worst_stages(config: RunConfig) -> list[int]:
    """Return the stages that may need most memory: one of them does.

    The first stage has the most microbatches in flight. The second has nearly as many, and it also receives hidden
    states and sends gradients. The last stage has the head.
    """
    last = config.parallel.pp - 1
    return sorted({0, min(1, last), last})
