"""Refuse a run that cannot fit or finish before it allocates anything.

The estimates are rough (see memo.estimate.memory for CPUs, memo.estimate.rank_memory for GPUs, and memo.estimate.time):
a run near the limit may be admitted and fail, or be refused although it would just fit. On GPUs a run under
--offload-alpha auto is admitted when it fits with everything on the device, or with as little there as can be.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from memo.config import RunConfig
from memo.errors import ResourceError
from memo.estimate.host_memory import available_host_bytes as available_host_bytes
from memo.estimate.memory import MemoryEstimate, estimate_memory
from memo.estimate.rank_memory import RankMemory, rank_memory
from memo.estimate.shapes import shape_of
from memo.estimate.time import estimate_step_s
from memo.units import format_bytes, format_duration_s


@dataclass(frozen=True)
class Admission:
    """What an admitted run is expected to take."""

    worst_rank: MemoryEstimate | RankMemory
    shared_bytes: int
    """Bytes of the ranks that share one memory."""
    step_s: float


def admit(config: RunConfig, world_size: int, available_bytes: int, peak_flops: float, local_ranks: int) -> Admission:
    """Estimate a checked run; raises ResourceError when it needs more memory or time than there is.

    Args:
        available_bytes: free bytes of one memory: the node's on CPU (`available_host_bytes`), one
            device's on CUDA.
        peak_flops: peak of one rank, FLOP/s.
        local_ranks: ranks that share that memory: those of the node on CPU, 1 on CUDA.
    """
    admission = _estimate(config, world_size, peak_flops, local_ranks)
    limit_s = 60.0 * config.training.max_step_minutes
    fits = admission.shared_bytes <= available_bytes
    if fits and admission.step_s <= limit_s:
        return admission

    def is_within(seq_length: int) -> bool:
        shorter = replace(config, data=replace(config.data, seq_length=seq_length))
        estimate = _estimate(shorter, world_size, peak_flops, local_ranks)
        return estimate.shared_bytes <= available_bytes and estimate.step_s <= limit_s

    memory, step_s = admission.worst_rank, format_duration_s(admission.step_s)
    names = [field.name for field in fields(memory) if field.name != "host"]
    parts = ", ".join(f"{name} {format_bytes(getattr(memory, name))}" for name in names)
    within = "within" if admission.step_s <= limit_s else "above"
    raise ResourceError(
        f"--seq-length {config.data.seq_length} is too {'slow' if fits else 'large'} for this machine: a rank "
        f"needs {format_bytes(memory.total)} ({parts}); the ranks that share this memory ({local_ranks}) need "
        f"{format_bytes(admission.shared_bytes)}, available are {format_bytes(available_bytes)}; one step "
        f"takes about {step_s}, {within} --max-step-minutes {config.training.max_step_minutes:g}: "
        + _remedy(config, is_within, only_time=fits)
    )


def _estimate(config: RunConfig, world_size: int, peak_flops: float, local_ranks: int) -> Admission:
    stages = [_memory(config, world_size, stage) for stage in range(config.parallel.pp)]
    # Which stages share a node depends on the launcher: assume the most demanding ranks do.
    ranks = sorted(stages * (world_size // config.parallel.pp), key=lambda m: m.total, reverse=True)
    shared = sum(memory.total for memory in ranks[:local_ranks])
    return Admission(ranks[0], shared, estimate_step_s(config, world_size, peak_flops))


def _memory(config: RunConfig, world_size: int, stage: int) -> MemoryEstimate | RankMemory:
    if config.hardware.device != "cuda":
        return estimate_memory(config, world_size, stage)
    shape = shape_of(config.model, "", config.data.seq_length)
    memory = rank_memory(config, shape, world_size, stage)
    if config.memory.swaps and config.memory.offload_alpha == "auto":
        swapped = rank_memory(config, shape, world_size, stage, moved={})
        return min(memory, swapped, key=lambda rank: rank.total)
    return memory


def _remedy(config: RunConfig, is_within: Callable[[int], bool], only_time: bool) -> str:
    tp, cp = config.parallel.tp, config.parallel.cp
    step = tp if cp == 1 else 2 * cp * tp
    longer = "raise --max-step-minutes, " if only_time else ""
    spread = "spread the run over more devices with --tp, --cp and --pp"
    low, high = 0, config.data.seq_length // step  # in steps: low fits (0: none does), high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle * step) else (low, middle)
    if low == 0:
        return f"no sequence length fits: {longer}{spread}, or choose a smaller --model"
    return f"use --seq-length {low * step} or less, {longer}or {spread}"
