"""Records the memory requests of an iteration, and serves the requests of later iterations at planned addresses.

    allocator = PlannedAllocator.install("cpu")
    with allocator.record() as recording:
        train_step()                            # marks its phases, see below
    plan = solve(recording.trace)               # memo.planner
    allocator.use(plan)
    for _ in range(steps):
        train_step()

    def train_step():
        with allocator.iteration():
            allocator.mark("layer_forward", layer=0, microbatch=0)
            ...

Requests that differ from the plan are served by torch's own allocator and counted. They cost memory, not correctness.

In phases of the kind ATTENTION, requests depend on the packed documents. They are served from one block for each phase
(csrc/core/planned_core.h), which memo.planner.attention_blocks has put into the trace.
"""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memo.allocator import build
from memo.allocator.library import OUTSIDE, Mode, NativeLibrary, RawEvent
from memo.allocator.statistics import Statistics, from_raw
from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.memory_trace import ATTENTION, Event, Free, Malloc, Phase, Trace, check_trace
from memo.errors import AllocatorError, PlanError, TraceError
from memo.units import format_bytes

ALIGNMENT_BYTES = {"cpu": 64, "cuda": 512}
"""The alignment that torch's own allocators guarantee, on which kernels rely."""

_NO_LIMIT_BYTES = (1 << 63) - 1

PhaseName = tuple[str, int, int]


class Recording:
    """The result of `PlannedAllocator.record`."""

    trace: Trace
    """The recorded trace, once the recording has ended."""


class PlannedAllocator:
    """The planned allocator of one device type of this process.

    It stays in front of torch's allocator until the process ends, and passes all requests on to it unless it records or
    obeys a plan. Use one instance for each device type: a second one would share the native state, but not the names of
    the phases.
    """

    def __init__(self, library: NativeLibrary, device: build.Device) -> None:
        self.device = device
        self._library = library
        self._mode = Mode.PASSTHROUGH
        self._plan: MemoryPlan | None = None
        self._places: dict[PhaseName, list[int]] = {}
        self._recorded: list[PhaseName] = []
        self._num_recorded = 0
        self._seen: collections.Counter[PhaseName] = collections.Counter()

    @classmethod
    def install(cls, device: build.Device) -> "PlannedAllocator":
        """Build the native library if necessary, and install it in torch.

        Raises AllocatorError with the reason if that fails; training can go on without it.
        """
        if device not in build.DEVICES:
            raise AllocatorError(f"device = {device!r} has no planned allocator: give one of {build.DEVICES}")
        if device == "cuda" and not torch.cuda.is_available():
            raise AllocatorError("device = 'cuda', but torch finds no CUDA device: give 'cpu'")
        return cls(NativeLibrary(build.library(device)), device)

    @contextlib.contextmanager
    def record(self, run: dict[str, Any] | None = None) -> Iterator[Recording]:
        """Record the iteration that runs inside; `run` is a description that is stored in the trace.

        As in a plan, only requests of the thread that marked the phase are recorded, and on CUDA only requests for the
        stream that is current now. A loaded plan is not used meanwhile. At the end raises TraceError unless exactly one
        iteration ran, and made requests.
        """
        before, self._num_recorded = self._mode, 0
        recording = Recording()
        self._set_mode(Mode.RECORD)
        try:
            yield recording
        finally:
            self._set_mode(before)
        if self._num_recorded != 1:
            raise TraceError(f"{self._num_recorded} iterations ran while recording: run one `with iteration()`")
        phases = _phases(self._recorded, self._library.events())
        recording.trace = Trace(self.device, "recorded", phases, run or {})
        check_trace(recording.trace)

    @contextlib.contextmanager
    def managed_memory(self, oversubscribe: bool = False) -> Iterator[None]:
        """Serve requests inside from CUDA's managed memory, as MEMO does to record more than a device holds.

        This is slow, and meant for recording, not for training. torch's allocator still serves requests below 1 MiB.

        Args:
            oversubscribe: allow more than the device has free; pages then move to the host and back, and a device can
                hang.

        Raises AllocatorError if the device has no managed memory, and, unless `oversubscribe`, for the first request
        that would exceed the memory that was free at the start.
        """
        if self.device != "cuda":
            raise AllocatorError(f"managed memory is CUDA's, but this is the allocator of device {self.device!r}")
        torch.cuda.empty_cache()
        free_bytes = int(torch.cuda.mem_get_info()[0])
        self._library.open_managed(_NO_LIMIT_BYTES if oversubscribe else free_bytes)
        try:
            yield
        except RuntimeError as error:
            if not (refused_bytes := self._library.managed_use().refused_bytes):
                raise
            raise AllocatorError(
                f"--managed-memory: the iteration asks for {format_bytes(refused_bytes)} or more at once, but the "
                f"device has {format_bytes(free_bytes)} free: record a shorter sequence, move or recompute more, or "
                "give --oversubscribe, with which pages move to the host and back, and a device may hang"
            ) from error
        finally:
            self._library.close_managed()

    def use(self, plan: MemoryPlan) -> None:
        """Allocate the plan's arena, and serve from it from the next iteration on; replaces an earlier plan.

        Raises PlanError if the plan is for another device, if its addresses are invalid, or if its arena cannot be
        allocated; then all requests are passed on to torch's allocator.
        """
        if self._mode is Mode.RECORD:
            raise PlanError("a memory plan cannot be loaded while recording: leave `with allocator.record()` first")
        if plan.device != self.device:
            raise PlanError(f"the memory plan is for device {plan.device!r}, not {self.device!r}: plan this one")
        alignment_bytes = ALIGNMENT_BYTES[self.device]
        if plan.alignment_bytes % alignment_bytes:
            raise PlanError(
                f"the memory plan has alignment_bytes = {plan.alignment_bytes}, but {self.device} needs a multiple of "
                f"{alignment_bytes}: plan with that"
            )
        self.reset_statistics()
        self._load(plan)

    def _load(self, plan: MemoryPlan) -> None:
        self._set_mode(Mode.PASSTHROUGH)
        self._plan, self._places = None, {}
        requests: list[tuple[int, int]] = []
        ends = []
        for phase in plan.phases:
            requests += [(request.num_bytes, request.offset_bytes) for request in phase.requests]
            ends.append(len(requests))
        self._library.load_plan(
            requests,
            ends,
            [phase.kind == ATTENTION for phase in plan.phases],
            min_bytes=plan.min_bytes,
            alignment_bytes=plan.alignment_bytes,
            arena_bytes=plan.arena_bytes,
        )
        self._plan = plan
        for index, phase in enumerate(plan.phases):
            self._places.setdefault((phase.kind, phase.layer, phase.microbatch), []).append(index)
        self._set_mode(Mode.PLANNED)

    def lend(self) -> MemoryPlan | None:
        """Return the plan after giving the memory of its arena to torch's allocator, unless blocks in it are alive, and
        all requests; None without a plan. `take_back` ends this. Call it between iterations, as for an evaluation."""
        if self._plan is not None:
            self._set_mode(Mode.PASSTHROUGH)
            self._library.unload_plan()
        return self._plan

    def take_back(self, plan: MemoryPlan) -> None:
        """Serve from the plan that `lend` has returned again; the statistics go on.

        Raises PlanError if torch's allocator has no room for the arena any more, and then serves all requests.
        """
        self._load(plan)

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """A context around one training iteration. Requests outside of it, as in evaluation, are never planned.

        Raises AllocatorError at its end for errors that occurred while blocks were freed.
        """
        self._seen.clear()
        if self._mode is Mode.RECORD:
            self._recorded.clear()
            self._num_recorded += 1
        self._library.begin_iteration()
        try:
            yield
        finally:
            self._library.end_iteration()
        self._library.take_fault()

    def mark(self, kind: str, layer: int = -1, microbatch: int = -1) -> None:
        """Begin a phase, which ends the one before; the plan is looked up by the phase's name.

        Call it in the thread that will request memory; on CUDA, backward runs in a thread of autograd. If a name occurs
        several times in an iteration, it stands for the plan's phases of that name, in order. If the plan has no such
        phase, torch's allocator serves its requests.
        """
        if self._mode is Mode.PASSTHROUGH:
            return
        name = (kind, layer, microbatch)
        if self._mode is Mode.RECORD:
            self._recorded.append(name)
            index = len(self._recorded) - 1
        else:
            places, turn = self._places.get(name, ()), self._seen[name]
            index = places[turn] if turn < len(places) else OUTSIDE
            self._seen[name] += 1
        self._library.mark(index)

    def settle(self, tensor: torch.Tensor) -> None:
        """Declare that the current stream has waited for one use of `tensor` by another stream.

        Call it once for each `record_stream`, after the wait for that use; then freeing the block waits for nothing.
        torch calls record_stream for each tensor of a message between two ranks under NCCL.
        """
        self._library.settle(tensor.untyped_storage().data_ptr())

    @property
    def statistics(self) -> Statistics:
        return from_raw(self._library.statistics(), self._plan)

    def reset_statistics(self) -> None:
        self._library.reset_statistics()

    def set_poison(self, is_on: bool) -> None:
        """For tests: whether freed planned blocks are overwritten with NaN."""
        self._library.set_poison(is_on)

    def _set_mode(self, mode: Mode) -> None:
        self._library.set_mode(mode)
        self._mode = mode


def _phases(names: list[PhaseName], raw: collections.abc.Sequence[RawEvent]) -> tuple[Phase, ...]:
    events: list[list[Event]] = [[] for _ in names]
    for event in raw:
        events[event.phase].append(Malloc(event.id, event.num_bytes) if event.num_bytes else Free(event.id))
    return tuple(Phase(*name, tuple(found)) for name, found in zip(names, events, strict=True))
