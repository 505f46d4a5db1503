"""Observes the calls of memo that order streams, one by one in a training step; one of them can be lost.

    wait        a stream waits for an event
    host wait   the host waits for an event or for a stream
    recording   an event is recorded
    message     the current stream waits for a message that was begun; one that is not asynchronous waits by itself
    issuing     a message is begun behind the work of a copy stream
    copy        the executor copies on one of its streams

A lost call keeps its place in time, but the race checker does not see its order (EmulatedGpu.hidden). So the checker
judges the program without the call, while numbers stay right and ranks do not wait for each other for ever. A lost copy
runs on the other copy stream, and a lost issuing on the compute stream; hidden waits keep their place in time.
"""

import contextlib
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import memo
from memo.emulated_gpu.face import EmulatedGpu
from memo.executor.cuda_streams import CudaStreams
from memo.executor.streams import Stream

_MEMO = str(Path(memo.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
# Functions that only pass on the calls of others.
_SHELL = {"cuda_streams.py", "collectives.py", "group.py"}
_OTHER = {Stream.OFFLOAD: Stream.PREFETCH, Stream.PREFETCH: Stream.OFFLOAD}


@dataclass(frozen=True)
class Order:
    """One call that orders streams, or a copy that relies on such a call: number `turn` of its place in a step."""

    place: str  # kind, file, function, source
    turn: int
    is_redundant: bool = False

    def is_like(self, other: "Order | None") -> bool:
        return other is not None and (self.place, self.turn) == (other.place, other.turn)


@dataclass
class Watch:
    """Observes each order of a step, in turn; the order `lost` is lost, or left out entirely if `leaves_out`."""

    gpu: EmulatedGpu
    lost: Order | None = None
    leaves_out: bool = False
    orders: list[Order] = field(default_factory=list)
    # By place in orders: the numbers of a wait, and the id of its event if memo has recorded it.
    waits: dict[int, tuple[range, int | None]] = field(default_factory=dict)
    recordings: dict[int, int] = field(default_factory=dict)  # place in orders of the latest, by event id
    turns: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)  # a checkpoint is written by a thread of its own

    def begin(self, lost: Order | None = None, leaves_out: bool = False) -> None:
        self.lost, self.leaves_out = lost, leaves_out
        self.orders, self.waits, self.recordings, self.turns = [], {}, {}, Counter()

    def order(self, kind: str, frame: FrameType) -> tuple[int | None, bool]:
        """Return the place of a call in orders, None if it is not memo's, and whether it is lost."""
        source = _place(frame)
        if source is None:
            return None, False
        with self.lock:
            order = Order(f"{kind} {source}", self.turns[f"{kind} {source}"])
            self.turns[order.place] += 1
            self.orders.append(order)
            return len(self.orders) - 1, order.is_like(self.lost)

    def wait(self, kind: str, frame: FrameType, event: int | None, act: Callable[[], Any]) -> Any:
        place, is_lost = self.order(kind, frame)
        if is_lost and self.leaves_out:
            return None
        first = self.gpu.num_waits()
        with self.gpu.hidden(waits=True) if is_lost else contextlib.nullcontext():
            done = act()
        if place is not None:
            self.waits[place] = range(first, self.gpu.num_waits()), event
        return done

    def finish(self) -> list[Order]:
        """Return the orders of a whole step with the checker's findings; call it after the next step.

        A recording is redundant if all waits for it are, in its own step and the next.
        """
        needed = set()
        for place, (numbers, event) in self.waits.items():
            is_redundant = all(self.gpu.is_wait_redundant(number) for number in numbers)
            self.orders[place] = replace(self.orders[place], is_redundant=is_redundant)
            if not is_redundant and event is not None:
                needed.add(event)
        for event, place in self.recordings.items():
            self.orders[place] = replace(self.orders[place], is_redundant=event not in needed)
        return self.orders


def _place(frame: FrameType | None) -> str | None:
    """Return the place of the caller outside tests, torch and the shell; None: the caller is not memo."""
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        is_memo = str(path).startswith(_MEMO)
        if is_memo and path.name not in _SHELL and name != "follow":
            source = linecache.getline(str(path), frame.f_lineno).partition("  #")[0].strip()
            return f"{path.name} {name}: {source}"
        if not is_memo and not {"torch", "contextlib.py"} & set(path.parts):
            return None
        frame = frame.f_back
    return None


def _caller() -> FrameType:
    """Return the frame of the caller of a function that replaces one of torch's."""
    return sys._getframe(2)


class _Real:
    """torch's own functions, and the executor's."""

    wait_event, record = torch.cuda.Stream.wait_event, torch.cuda.Event.record
    event_synchronize, stream_synchronize = torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize
    work_wait, all_reduce, all_to_all = dist.Work.wait, dist.all_reduce, dist.all_to_all_single
    copy, issuing, tolist = CudaStreams.copy, CudaStreams.issuing, Tensor.tolist


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Let the watch observe all calls of memo inside."""
    kept: list[torch.cuda.Event] = []  # keeps events alive, so that no later event gets the id of an earlier one

    def wait_event(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        watch.wait("wait", _caller(), id(event), lambda: _Real.wait_event(stream, event))

    def event_synchronize(event: torch.cuda.Event) -> None:
        watch.wait("host wait", _caller(), id(event), lambda: _Real.event_synchronize(event))

    def stream_synchronize(stream: torch.cuda.Stream) -> None:
        watch.wait("host wait", _caller(), None, lambda: _Real.stream_synchronize(stream))

    def work_wait(work: dist.Work, *arguments: Any) -> Any:
        if _caller().f_code.co_filename.startswith(_TORCH):  # of a message that is not asynchronous: counted there
            return _Real.work_wait(work, *arguments)
        return watch.wait("message", _caller(), None, lambda: _Real.work_wait(work, *arguments))

    def record(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        kept.append(event)
        place, is_lost = watch.order("recording", _caller())
        if place is not None:
            watch.recordings[id(event)] = place
        if is_lost and watch.leaves_out:
            return
        with watch.gpu.hidden(recordings=True) if is_lost else contextlib.nullcontext():
            _Real.record(event, stream)

    def copy(self: CudaStreams, stream: Stream, dst: Tensor, src: Tensor, to: str, source: str) -> None:
        _, is_lost = watch.order("copy", _caller())
        used = _OTHER[stream] if is_lost else stream
        with _in_time(self, stream, used):
            _Real.copy(self, used, dst, src, to, source)

    @contextlib.contextmanager
    def issuing(self: CudaStreams, stream: Stream) -> Iterator[None]:
        _, is_lost = watch.order("issuing", _caller())
        used = Stream.COMPUTE if is_lost else stream
        with _in_time(self, stream, used), _Real.issuing(self, used):
            yield

    @contextlib.contextmanager
    def _in_time(backend: CudaStreams, stream: Stream, used: Stream) -> Iterator[None]:
        """Let work on `used` run when work on `stream` would, without an order that the checker sees."""
        right, wrong = backend._stream(stream), backend._stream(used)

        def follow(one: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
            event = torch.cuda.Event()
            _Real.record(event, other)
            with watch.gpu.hidden(waits=True):
                _Real.wait_event(one, event)

        if stream is used or watch.leaves_out:
            yield
            return
        follow(wrong, right)
        yield
        follow(right, wrong)

    def synchronous(real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a message that is not asynchronous; a lost one is asynchronous, and nothing waits for it."""

        def collective(*arguments: Any, **options: Any) -> None:
            place, is_lost = watch.order("message", _caller())
            if place is None or not is_lost:
                real(*arguments, **options)
                return
            work = real(*arguments, **options, async_op=True)
            if not watch.leaves_out:
                with watch.gpu.hidden(waits=True):
                    _Real.work_wait(work)

        return collective

    def tolist(tensor: Tensor) -> Any:
        if tensor.device.type == "cpu":
            tensor = tensor.clone()  # tolist() itself bypasses torch's dispatcher, in which the checker looks
        return _Real.tolist(tensor)

    stream, event, shell = torch.cuda.Stream, torch.cuda.Event, CudaStreams
    with contextlib.ExitStack() as undo:
        for owner, name, made in (
            (stream, "wait_event", wait_event),
            (stream, "synchronize", stream_synchronize),
            (event, "record", record),
            (event, "synchronize", event_synchronize),
            (dist.Work, "wait", work_wait),
            (dist, "all_reduce", synchronous(_Real.all_reduce)),
            (dist, "all_to_all_single", synchronous(_Real.all_to_all)),
            (shell, "copy", copy),
            (shell, "issuing", issuing),
            (Tensor, "tolist", tolist),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, made)
        yield
