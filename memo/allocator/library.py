"""The native allocator's C functions (csrc/core/control.h), loaded into this process."""

import ctypes
import enum
from collections.abc import Sequence
from pathlib import Path

from memo.artifacts.reading import shown
from memo.errors import AllocatorError, PlanError

REASONS = ("size", "thread", "stream", "overlap", "exhausted", "block")
"""Reasons why torch's allocator served a request of a planned phase, in the order of enum Reason in
csrc/core/statistics.h."""
NUM_NAMED = 4

OUTSIDE = -1
"""The number for a phase that the plan does not have."""


class Mode(enum.IntEnum):
    PASSTHROUGH, RECORD, PLANNED = range(3)


class RawEvent(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("phase", "id", "num_bytes")]


class RawMismatch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("phase", "position", "expected_bytes", "found_bytes")]


COUNTS = ("requests", "hits", "native", "unasked", "outside", "arena_bytes", "live_blocks", "live_bytes", "peak_bytes")


class RawStatistics(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in COUNTS),
        ("fallbacks", ctypes.c_int64 * len(REASONS)),
        ("first", RawMismatch * NUM_NAMED * len(REASONS)),
    ]


class RawManagedUse(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("limit_bytes", "live_bytes", "peak_bytes", "refused_bytes")]


class NativeLibrary:
    """The loaded library. Its state belongs to the process, so loading it twice gives the same allocator."""

    def __init__(self, path: Path) -> None:
        """Load it and install its allocator in front of torch's until the process ends. Raises AllocatorError."""
        try:
            self._native = ctypes.CDLL(str(path))
        except OSError as error:
            raise AllocatorError(
                f"the native allocator cannot be loaded ({error}): delete {path}, then it is built again"
            ) from None
        i64, pointer = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
        self._declare("install", ctypes.c_char_p)
        self._declare("load_plan", ctypes.c_char_p, pointer, i64, pointer, i64, pointer, i64, i64, i64)
        self._declare("unload_plan", ctypes.c_char_p)
        self._declare("set_mode", ctypes.c_char_p, ctypes.c_int)
        self._declare("num_events", i64)
        self._declare("copy_events", None, ctypes.POINTER(RawEvent))
        self._declare("statistics", None, ctypes.POINTER(RawStatistics))
        self._declare("take_fault", ctypes.c_char_p)
        self._declare("open_managed", ctypes.c_char_p, i64)
        self._declare("managed_use", None, ctypes.POINTER(RawManagedUse))
        # Functions that need no wrapper; some are called for every phase or message.
        self.set_poison = self._declare("set_poison", None, ctypes.c_int)
        self.reset_statistics = self._declare("reset_statistics", None)
        self.close_managed = self._declare("close_managed", None)  # blocks that are alive stay until they are freed
        self.begin_iteration = self._declare("begin_iteration", None)
        self.mark = self._declare("mark", None, i64)
        self.end_iteration = self._declare("end_iteration", None)
        self.settle = self._declare("settle", None, ctypes.c_void_p)
        if refusal := self._native.memo_install():
            raise AllocatorError(f"the native allocator cannot be put into torch: {refusal.decode()}")

    def _declare(self, name: str, result: type | None, *arguments: type) -> "ctypes._NamedFuncPointer":
        function = getattr(self._native, f"memo_{name}")
        function.restype, function.argtypes = result, arguments
        return function

    def load_plan(
        self,
        sizes_and_offsets: Sequence[tuple[int, int]],
        phase_ends: Sequence[int],
        has_block: Sequence[bool],
        *,
        min_bytes: int,
        alignment_bytes: int,
        arena_bytes: int,
    ) -> None:
        """Allocate the arena; the mode is PASSTHROUGH until it is set.

        `has_block`: for each phase, whether it is a phase of attention, whose last request is its block.

        Raises PlanError, also for numbers beyond int64.
        """
        flat = [number for pair in sizes_and_offsets for number in pair]
        limits = (min_bytes, alignment_bytes, arena_bytes)
        requests, ends, blocks = _int64s(flat), _int64s(phase_ends), _int64s(has_block)
        _int64s(limits)
        self._check(self._native.memo_load_plan(requests, len(flat) // 2, ends, len(ends), blocks, *limits))

    def unload_plan(self) -> None:
        """Free the arena, unless blocks in it are alive, and set the mode to PASSTHROUGH."""
        self._check(self._native.memo_unload_plan())

    def set_mode(self, mode: Mode) -> None:
        self._check(self._native.memo_set_mode(int(mode)))

    def take_fault(self) -> None:
        """Raise AllocatorError if an error has occurred since the last call in code that could not raise it."""
        if fault := self._native.memo_take_fault():
            raise AllocatorError(
                f"the native allocator failed while it freed a block: {fault.decode(errors='replace')}: start again "
                "with --memory-planner off, and report it"
            )

    def events(self) -> Sequence[RawEvent]:
        """The events of the last recorded iteration."""
        events = (RawEvent * self._native.memo_num_events())()
        self._native.memo_copy_events(events)
        return events

    def statistics(self) -> RawStatistics:
        found = RawStatistics()
        self._native.memo_statistics(ctypes.byref(found))
        return found

    def open_managed(self, limit_bytes: int) -> None:
        """Serve requests from managed memory, at most `limit_bytes` of it at a time. Raises AllocatorError."""
        if refusal := self._native.memo_open_managed(_int64s([limit_bytes])[0]):
            raise AllocatorError(f"managed memory cannot be used: {refusal.decode()}")

    def managed_use(self) -> RawManagedUse:
        """Use of managed memory since it was opened."""
        found = RawManagedUse()
        self._native.memo_managed_use(ctypes.byref(found))
        return found

    def _check(self, error: bytes | None) -> None:
        if error is not None:
            raise PlanError(f"the memory plan cannot be used: {error.decode(errors='replace')}")


def _int64s(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """The numbers as C reads them. Raises PlanError for numbers that ctypes would silently take modulo 2^64."""
    for value in (min(values, default=0), max(values, default=0)):
        if not -(1 << 63) <= value < 1 << 63:
            raise PlanError(f"the memory plan cannot be used: {shown(value)} does not fit into 64 bits: plan anew")
    return (ctypes.c_int64 * len(values))(*values)
