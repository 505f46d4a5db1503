"""Gives the transient memory of a step fixed addresses: records an iteration, plans it, and obeys the plan."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memo.allocator.planned import ALIGNMENT_BYTES, PlannedAllocator
from memo.allocator.statistics import Statistics
from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.memory_trace import Trace
from memo.config import RunConfig
from memo.config.memory import MemoryConfig, MemoryPlanner
from memo.errors import AllocatorError, PlanError, TraceError
from memo.executor.phases import Phases
from memo.planner.memory.trace_plan import solve_trace
from memo.planner.memory_table import describe_plan, plan_headline
from memo.planner.traces import merge
from memo.units import format_bytes

_WARM_UP, _RECORDED = 1, 2
"""Iterations before training: one in which libraries allocate what they keep, and two that should be equal."""


_TORCH_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with which users configure torch's allocator."""

PACKED = (
    "documents are packed, so that no step asks for the sizes of the one that would be recorded; --memory-planner auto "
    "plans all the same"
)


def prepare_allocator(config: MemoryConfig, device_type: str, wanted: MemoryPlanner | None) -> str:
    """Build and install the allocator that obeys plans; call it before any memory of a CUDA device is allocated.

    torch's own allocator serves what no plan covers: states and the buffers of streams, or everything if nothing is
    planned or the planned allocator cannot be built. It fragments least with expandable_segments, so these are switched
    on, unless the user has configured the allocator or given --memory-planner off.

    Args:
        config: the configuration with the resolved planner.
        wanted: the planner as the user gave it.

    Returns a text for the header of the run that says which allocator serves it; "" if the plan describes itself, or if
    the user has decided.
    """
    if device_type != "cuda" or wanted == "off":
        return ""
    if not any(os.environ.get(name) for name in _TORCH_SETTINGS):
        _set_torch_allocator("expandable_segments:True")
    if not config.plans:
        return f"torch's own allocator{_segments()} ({PACKED})"
    with contextlib.suppress(AllocatorError):  # Transients reports the reason
        PlannedAllocator.install("cuda")
    return ""


def _set_torch_allocator(settings: str) -> None:
    """Uses the binding of torch 2.11 to 2.14; torch.cuda's function of this name calls it too, but warns."""
    set_it = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (set_it or torch.cuda.memory._set_allocator_settings)(settings)


def _segments() -> str:
    """A text that says whether torch's allocator for CUDA uses expandable segments, as its snapshot reports."""
    is_expandable = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    return " with expandable_segments" if is_expandable else ""


def describe_run(config: RunConfig, world_size: int, stage: int) -> dict[str, Any]:
    """The description of a run that is written into a trace."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in ("model", "parallel", "memory")}
    lengths = {"seq_length": config.data.seq_length, "micro_batch_size": config.training.micro_batch_size}
    return {**sections, **lengths, "world_size": world_size, "stage": stage}


@dataclass(frozen=True)
class PlannedMemory:
    """The plan of this rank, and what it was made from."""

    plan: MemoryPlan
    trace: Trace

    def describe(self) -> str:
        return describe_plan(self.plan, self.trace)

    def headline(self) -> str:
        return plan_headline(self.plan, self.trace)


class Transients:
    """Marks the phases of this rank's iterations, records their memory requests, plans them, and serves the plan.

    If the planned allocator cannot be built, or two iterations differ, training goes on with torch's own allocator, and
    `reason` says why.
    """

    def __init__(self, config: MemoryConfig, device_type: str) -> None:
        self.config, self.on_cuda = config, device_type == "cuda"
        self.planned: PlannedMemory | None = None
        self.reason = ""
        self.allocator: PlannedAllocator | None = None
        try:
            self.allocator = PlannedAllocator.install("cuda" if device_type == "cuda" else "cpu")
        except AllocatorError as error:
            self.reason = str(error)
        self.phases = Phases(_untold if self.allocator is None else self.allocator.mark)

    def iteration(self) -> contextlib.AbstractContextManager[None]:
        """A context around one step: forwards, backwards, reduction and optimizer."""
        return contextlib.nullcontext() if self.allocator is None else self.allocator.iteration()

    def managed_memory(self, oversubscribe: bool) -> contextlib.AbstractContextManager[None]:
        """A context around iterations that may exceed the device's memory; see PlannedAllocator.managed_memory."""
        return contextlib.nullcontext() if self.allocator is None else self.allocator.managed_memory(oversubscribe)

    def plan(self, run_iteration: Callable[[], object], run: dict[str, object]) -> None:
        """Make a plan by `foresee`, and serve all later iterations from it."""
        self.foresee(run_iteration, run)
        if self.planned is None or self.allocator is None:
            return
        if self.allocator.device == "cuda":
            torch.cuda.empty_cache()  # free the unused memory of the recording before the arena is allocated
        try:
            self.allocator.use(self.planned.plan)
        except PlanError as error:
            self.planned, self.reason = None, str(error)

    def foresee(self, run_iteration: Callable[[], object], run: dict[str, object]) -> None:
        """Record `run_iteration`, which must not change the training state, and make a plan. `run` describes the run.

        Collective, because an iteration communicates.
        """
        if self.allocator is None:  # the other ranks may have an allocator, and communicate
            for _ in range(_WARM_UP + _RECORDED):
                run_iteration()
            return
        for _ in range(_WARM_UP):
            run_iteration()
        traces = [self._recorded(self.allocator, run_iteration, run) for _ in range(_RECORDED)]
        try:
            trace = self._agreed(*traces)
            alignment_bytes = ALIGNMENT_BYTES[self.allocator.device]
            planner = self.config.memory_planner
            assert planner is not None and planner != "off"
            plan = solve_trace(trace, planner, self.config.memory_planner_min_bytes, alignment_bytes).plan
            self.planned = PlannedMemory(plan, trace)
        except (TraceError, PlanError) as error:
            self.reason = str(error)

    def _agreed(self, one: Trace, other: Trace) -> Trace:
        """One trace made of two. If they differ, the one with fewer requests; torch's allocator serves what exceeds it.

        They differ if the requests depend on data (packed documents), and now and then with gloo: autograd adds in
        place only to tensors that no sending thread holds.
        """
        try:
            return merge(one, other)
        except TraceError as error:
            self.reason = str(error)
            return min(one, other, key=lambda trace: sum(len(phase.events) for phase in trace.phases))

    @staticmethod
    def _recorded(allocator: PlannedAllocator, run_iteration: Callable[[], object], run: dict[str, object]) -> Trace:
        with allocator.record(run) as recording:
            run_iteration()
        return recording.trace

    def describe(self) -> str:
        """A text that says what is reserved, or why nothing is planned."""
        return self._told("" if self.planned is None else self.planned.describe(), "\n")

    def headline(self) -> str:
        """The same in one line."""
        return self._told("" if self.planned is None else self.planned.headline(), "; ")

    def _told(self, plan: str, between: str) -> str:
        if self.planned is None:
            segments = _segments() if self.on_cuda else ""
            return f"not planned, torch's own allocator serves it{segments}: {self.reason}"
        note = f"{between}some requests will not be as planned: {self.reason}" if self.reason else ""
        return plan + note

    def report(self) -> str:
        """One line about how many requests were served as planned."""
        found = self.statistics()
        if found is None:
            return f"planned memory: none ({self.reason})"
        other = ", ".join(f"{count} of another {reason}" for reason, count in found.fallbacks.items() if count)
        return (
            f"planned memory: {found.hits} of {found.requests - found.native} requests at their address, at most "
            f"{format_bytes(found.peak_bytes)} of {format_bytes(found.arena_bytes)} reserved"
            + (f"; torch's allocator served {other}, first {found.mismatches[0]}" if other else "")
        )

    def statistics(self) -> Statistics | None:
        """Counts since the plan was made; None without a plan."""
        return self.allocator.statistics if self.allocator is not None and self.planned is not None else None


def _untold(kind: str, layer: int, microbatch: int) -> None:
    """No allocator wants to know where in an iteration the program is."""
