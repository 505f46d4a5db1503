"""Gives the transient memory of a step fixed addresses: records an iteration, makes a plan, and obeys it.

    --memory-planner-from training     step 1, step 2 recorded, attention of other packings, plan, step 3 as planned
    --memory-planner-from rehearsal    steps that change nothing, plan, step 1 as planned

Libraries and the optimizer allocate memory that they keep in the first step, so it is not recorded.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memo.allocator.planned import ALIGNMENT_BYTES, PlannedAllocator
from memo.allocator.statistics import Statistics
from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.memory_trace import Trace
from memo.attention.blocks import demanding_packings
from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles, ring_size
from memo.config.memory import MemoryConfig
from memo.errors import AllocatorError, PlanError, TraceError
from memo.executor.phases import Phases
from memo.model.transformer import Microbatch
from memo.planner.attention_blocks import with_blocks
from memo.planner.memory.trace_plan import solve_trace
from memo.planner.memory_table import describe_plan, plan_headline
from memo.planner.traces import merge
from memo.units import format_bytes

_TORCH_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with which users configure torch's allocator."""


def prepare_allocator(config: MemoryConfig, device_type: str) -> None:
    """Build and install the allocator that obeys plans; call it before any memory of a CUDA device is allocated.

    torch's own allocator serves requests that no plan covers: states and the buffers of streams, or everything if the
    planned allocator cannot be built. It fragments least with expandable_segments, so they are switched on unless the
    user has configured the allocator or given --memory-planner off. `config` has the resolved planner.
    """
    if device_type != "cuda" or not config.plans:
        return
    if not any(os.environ.get(name) for name in _TORCH_SETTINGS):
        # The binding of torch 2.11 to 2.14; torch.cuda's function for it warns.
        set_it = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (set_it or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    with contextlib.suppress(AllocatorError):  # Transients reports the reason
        PlannedAllocator.install("cuda")


def describe_run(config: RunConfig, world_size: int, stage: int) -> dict[str, Any]:
    """The description of a run that is written into a trace."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in ("model", "parallel", "memory")}
    lengths = {"seq_length": config.data.seq_length, "micro_batch_size": config.training.micro_batch_size}
    return {**sections, **lengths, "world_size": world_size, "stage": stage}


def num_recordings(on_cuda: bool) -> int:
    """The number of alike steps to record.

    On a CPU the smaller of two traces is kept: autograd adds in place only to tensors that no thread of gloo holds at
    that moment.
    """
    return 1 if on_cuda else 2


def demanding_batches(config: RunConfig, batches: list[Microbatch]) -> list[list[Microbatch]]:
    """The global batch in its most demanding packings; none if documents are not packed."""
    if not config.data.may_pack:
        return []
    tiles = resolved_offload_tiles(config) if config.memory.sweeps else 1
    call_tokens = config.data.seq_length // (ring_size(config.model, config.parallel) * tiles)
    packings = demanding_packings(config.data.seq_length, config.training.micro_batch_size, call_tokens)
    return [[dataclasses.replace(batch, documents=packing) for batch in batches] for packing in packings]


def batches_to_record(config: RunConfig, batches: list[Microbatch], on_cuda: bool) -> list[list[Microbatch]]:
    """The global batches whose steps a rehearsal records."""
    return demanding_batches(config, batches) or [batches] * num_recordings(on_cuda)


@dataclass(frozen=True)
class PlannedMemory:
    """The plan of this rank, and the trace from which it was made."""

    plan: MemoryPlan
    trace: Trace


class Transients:
    """Marks the phases of this rank's iterations, records their memory requests, plans them, and serves the plan.

    If the planned allocator cannot be built, training goes on with torch's own allocator. If recorded iterations
    differ, it goes on with the plan of the smallest. `reason` says why.
    """

    def __init__(self, config: MemoryConfig, device_type: str, run: dict[str, Any]) -> None:
        """`run` describes the run in traces (`describe_run`)."""
        self.config, self.on_cuda, self._run = config, device_type == "cuda", run
        self.planned: PlannedMemory | None = None
        self.reason = ""
        self.allocator: PlannedAllocator | None = None
        self._num_to_record = 0
        self._is_warm = False
        self._traces: list[Trace] = []
        try:
            self.allocator = PlannedAllocator.install("cuda" if device_type == "cuda" else "cpu")
        except AllocatorError as error:
            self.reason = str(error)
        self.phases = Phases() if self.allocator is None else Phases(self.allocator.mark)

    def iteration(self) -> contextlib.AbstractContextManager[None]:
        """A context around one step: forwards, backwards, reduction and optimizer."""
        if self.allocator is None:
            return contextlib.nullcontext()
        if self.is_learning and self._is_warm:
            return self._recorded_iteration(self.allocator)
        return self.allocator.iteration()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """A context between iterations in which torch's allocator has the memory of the plan, which has no forwards
        without gradients: they would lie beside it."""
        allocator = self.allocator
        plan = None if allocator is None else allocator.lend()
        try:
            yield
        finally:
            if allocator is not None and plan is not None:
                try:
                    allocator.take_back(plan)
                except PlanError as error:
                    self.planned, self.reason = None, str(error)

    @contextlib.contextmanager
    def _recorded_iteration(self, allocator: PlannedAllocator) -> Iterator[None]:
        try:
            with allocator.record(self._run) as recording, allocator.iteration():
                yield
        except TraceError as error:  # the step itself is complete
            self.reason = str(error)
        else:
            self._traces.append(recording.trace)

    @property
    def is_learning(self) -> bool:
        """Whether steps of training are still to be recorded for a plan."""
        return self._num_to_record > 0

    def learn(self) -> None:
        """Record steps of training, after a first one that updates the weights."""
        self._num_to_record = num_recordings(self.on_cuda)
        self.reason = self.reason or "training ended before a step was recorded and planned"

    def stepped(self, updated: bool) -> bool:
        """Take note of a complete step of training, and whether it has updated the weights.

        Returns whether the plan is due: call `plan_learned` then. The answer is the same on all ranks, also on those
        that have no allocator.
        """
        if not self.is_learning:
            return False
        if self._is_warm:
            self._num_to_record -= 1
            return not self.is_learning
        self._is_warm = updated
        return False

    def plan_learned(self, rehearsals: Sequence[Callable[[], object]]) -> None:
        """Make a plan from the recorded steps, and serve all later iterations from it.

        `rehearsals` make attention's requests for further packings (memo.train.parallel_model). Collective.
        """
        parts = self._recorded(rehearsals)
        traces, self._traces = self._traces, []
        if self.allocator is not None and traces:
            self.reason = ""
            self._make(self.allocator, traces, parts)
            self._obey(self.allocator)

    def managed_memory(self, oversubscribe: bool) -> contextlib.AbstractContextManager[None]:
        """A context around iterations that may exceed the device's memory; see PlannedAllocator.managed_memory."""
        return contextlib.nullcontext() if self.allocator is None else self.allocator.managed_memory(oversubscribe)

    def plan(self, iterations: Sequence[Callable[[], object]]) -> None:
        """Make a plan with `foresee`, and serve all later iterations from it."""
        self.foresee(iterations)
        if self.allocator is not None:
            self._obey(self.allocator)

    def _obey(self, allocator: PlannedAllocator) -> None:
        if self.planned is None:
            return
        if allocator.device == "cuda":
            torch.cuda.empty_cache()  # free the unused memory of the recording before the arena is allocated
        try:
            allocator.use(self.planned.plan)
        except PlanError as error:
            self.planned, self.reason = None, str(error)

    def foresee(self, iterations: Sequence[Callable[[], object]]) -> None:
        """Record iterations, which must not change the training state, and make a plan.

        The first iteration runs once unrecorded, so that libraries allocate the memory that they keep. All iterations
        should make the same requests, except in phases of attention. Collective, because an iteration communicates.
        """
        iterations[0]()
        traces = self._recorded(iterations)
        if self.allocator is not None:
            self._make(self.allocator, traces)

    def _make(self, allocator: PlannedAllocator, traces: Sequence[Trace], parts: Sequence[Trace] = ()) -> None:
        """Make a plan from traces of whole steps, and traces of parts that show what attention requests."""
        min_bytes, alignment_bytes = self.config.memory_planner_min_bytes, ALIGNMENT_BYTES[allocator.device]
        planner = self.config.memory_planner
        assert planner is not None and planner != "off"
        try:
            trace = self._agreed(with_blocks(traces, min_bytes, alignment_bytes, parts))
            plan = solve_trace(trace, planner, min_bytes, alignment_bytes).plan
            self.planned = PlannedMemory(plan, trace)
        except (TraceError, PlanError) as error:
            self.reason = str(error)

    def _agreed(self, traces: Sequence[Trace]) -> Trace:
        """Merge the traces. If they differ, return the one with fewest requests; torch's allocator serves the excess.

        Traces differ if requests depend on data, and sometimes with gloo: autograd adds in place only to tensors that
        no sending thread holds.
        """
        try:
            return functools.reduce(merge, traces)
        except TraceError as error:
            self.reason = str(error)
            return min(traces, key=lambda trace: sum(len(phase.events) for phase in trace.phases))

    def _recorded(self, iterations: Sequence[Callable[[], object]]) -> list[Trace]:
        """Run iterations and return their traces. Without an allocator there are none, but other ranks may have one,
        and an iteration communicates."""
        traces = []
        for run_iteration in iterations:
            with contextlib.nullcontext() if self.allocator is None else self.allocator.record(self._run) as recording:
                run_iteration()
            if recording is not None:
                traces.append(recording.trace)
        return traces

    def describe(self) -> str:
        """Say in several lines which memory is reserved, or why nothing is planned."""
        return self._told(describe_plan, "\n")

    def headline(self) -> str:
        """Say in one line which memory is reserved, or why nothing is planned."""
        return self._told(plan_headline, "; ")

    def _told(self, tell: Callable[[MemoryPlan, Trace], str], between: str) -> str:
        if self.is_learning:
            return "torch's own allocator serves the first steps; a plan is made from them, for the steps after"
        if self.planned is None:
            is_expandable = self.on_cuda and torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
            segments = " with expandable_segments" if is_expandable else ""
            return f"not planned, torch's own allocator serves it{segments}: {self.reason}"
        note = f"{between}some requests will not be as planned: {self.reason}" if self.reason else ""
        return tell(self.planned.plan, self.planned.trace) + note

    def report(self) -> str:
        """Say in one line how many requests were served as planned."""
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
