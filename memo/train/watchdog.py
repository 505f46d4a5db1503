"""Two threads beside training that detect lost ranks and steps that hang.

    pulse thread (several ranks)    every second: reports that this rank is alive, reads whether a rank was lost, and
                                    checks two neighbours
    guard thread                    writes the heartbeat file, reports a step that hangs, and ends a process that cannot
                                    end by itself

A rank that waits for a lost rank is blocked in native code, where no exception reaches it. Under gloo the closed socket
ends the wait; under NCCL nothing does. So the guard gives the main thread GRACE_S to raise its own error, which
has more details; then the guard prints the reason and ends the process. Files on disk stay whole: a checkpoint is
`.partial` until it is published.
"""

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from memo.artifacts.regular_file import replace_file
from memo.artifacts.run_log import default_log
from memo.config import RunConfig
from memo.config.grid import rank_grid
from memo.errors import EXIT_FAILED, FileError, MemoError, RankLost, error_line, host_name
from memo.mesh import Coordinates, Watch, World
from memo.mesh.presence import CENSUS_S, PULSE_S, Loss, Presence
from memo.standard_streams import visible
from memo.train.heartbeat import Heartbeat

GRACE_S = 5.0
"""Time from the report of a lost rank to the end of this process, if it has not failed by itself."""
ENDING_S = 15.0
"""Time from an error of this rank to the end of its process, which may be blocked by messages of lost ranks."""
PATIENCE_S = 3 * CENSUS_S
"""Time that a rank with a failed message waits for a report of the cause."""
HANG_SHARE = 0.8
"""After this share of the timeout of messages, a step without progress prints the stacks of its threads."""
_TICK_S = 0.25

_MESSAGE_WORDS = (
    *("gloo/", "Gloo", "pair closure", "closed by peer", "Socket closed"),
    *("NCCL", "TCPStore", "DistBackendError", "DistNetworkError", "DistStoreError"),
)
"""Every error of a failed message between ranks contains one of these words; some errors of gloo name no source file.
"""
_TIMEOUT_WORDS = ("Timed out", "timed out", "timeout", "Timeout")


class Watchdog:
    """Created once the ranks of a run know each other; close() ends both threads. `watch` observes the messages of the
    mesh that is built with it; `name` is this rank's name in messages, None in a single process."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.rank, self.watch = config, world.rank, Watch()
        self.name: str | None = None
        self._presence: Presence | None = None
        self._timeout_s = config.parallel.distributed_timeout.total_seconds()
        if world.size > 1 and config.parallel.simulate_world is None:
            hosts = [member.host for member in world.members] or [host_name()] * world.size
            grid = rank_grid(config.parallel, world.size)
            names = [_name_of(rank, host, grid.coordinates(rank)) for rank, host in enumerate(hosts)]
            self.name = names[world.rank]
            self._store = world.store  # kept alive: on rank 0 it may be the server, which all ranks need to the end
            if world.store is not None:
                store = PrefixStore("presence", world.store.clone())  # type: ignore[attr-defined]
                self._presence = Presence(store, world.rank, world.members, names, config.parallel.distributed_timeout)
        path = config.logging.heartbeat_file
        self._heartbeat = Heartbeat(path) if path is not None and (world.rank == 0 or self.name is None) else None
        self._loss: Loss | None = None
        self._heard, self._pulse_stop, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._must_end_s: float | None = None
        self._error_text = ""
        self._suspects = self._is_over = False
        self._pulse_s = time.monotonic()
        self._doing, self._since_s, self._has_shown = "", 0.0, False
        self._guard_thread = threading.Thread(target=self._guard, name="memo-guard", daemon=True)
        self._guard_thread.start()
        if self._presence is not None:
            pulse = functools.partial(self._keep_pulse, self._presence)
            self._pulse_thread = threading.Thread(target=pulse, name="memo-pulse", daemon=True)
            self._pulse_thread.start()

    # Called by the main thread.

    def begin(self, step: str) -> None:
        """Begin to watch work that must not hang; `step` names it, such as "step 12"."""
        self._doing, self._since_s, self._has_shown = step, time.monotonic(), False

    def complete(self, iteration: int) -> None:
        """End the watch of the work; `iteration` iterations are complete."""
        self._doing = ""
        if self._heartbeat is not None:
            self._heartbeat.iteration = iteration

    @contextlib.contextmanager
    def reporting_errors(self, *, has_started: bool = True) -> Iterator[None]:
        """A context around work whose failure ends the run on all ranks: its errors go through `explain`."""
        try:
            yield
        except BaseException as error:
            explained = self.explain(error, has_started=has_started)
            if explained is error:
                raise
            raise explained from error

    def explain(self, error: BaseException, *, has_started: bool = True) -> BaseException:
        """Report an error that ends the run to all other ranks, and return the error to raise.

        The result is RankLost if a message failed because a rank was lost, otherwise the error itself.
        """
        if self._is_over or _is_orderly(error):
            return error
        self._is_over = True
        words = message_failure(error)
        if isinstance(error, OSError):
            error = FileError.of(error)
        if self._presence is not None:
            lost = None if words is None else self._who_left(words)
            error = error if lost is None else lost
            if self._loss is None:
                self._tell_others(self._presence, error)
        if isinstance(error, MemoError):
            error.failed_by(self.name, has_started)
            self._error_text = error_line(error)
        self._must_end_s = time.monotonic() + ENDING_S
        return error

    def _tell_others(self, presence: Presence, error: BaseException) -> None:
        why = str(error) if isinstance(error, MemoError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the store may be lost as well
            first = presence.leave(why)
            if isinstance(error, MemoError):
                error.is_known = first.rank != self.rank and first.why == why

    def close(self) -> None:
        """Report an orderly end and stop both threads; a second call does nothing.

        The pulse thread ends first, so that this report is the rank's last message to the store. Rank 0, which may be
        the store's server, can end after all reports.
        """
        if self._stop.is_set():
            return
        if self._presence is not None:
            self._pulse_stop.set()
            self._pulse_thread.join(timeout=GRACE_S)
            with contextlib.suppress(RuntimeError):
                self._presence.leave_in_order()
                self._presence.wait_for_readers(GRACE_S)
        self._stop.set()
        self._guard_thread.join(timeout=GRACE_S)

    # The pulse.

    def _keep_pulse(self, presence: Presence) -> None:
        census: tuple[float, list[bytes]] | None = None
        try:
            while not self._pulse_stop.wait(PULSE_S / 10 if self._suspects else PULSE_S):
                since_s, self._pulse_s = time.monotonic() - self._pulse_s, time.monotonic()
                presence.beat()
                loss = presence.lost() or presence.look_around(since_s)
                if loss is None and self._suspects:
                    if census is None:
                        census = time.monotonic(), presence.numbers()
                    elif time.monotonic() - census[0] > CENSUS_S:
                        loss, census = presence.silent_since(census[1]), None
                if loss is not None and loss.rank != self.rank:
                    self._hear(loss)
                    presence.leave_in_order()
                    return
        except RuntimeError as error:
            if not self._pulse_stop.is_set():
                self._hear(presence.keeper_gone(error))

    def _hear(self, loss: Loss) -> None:
        self._loss = loss
        if self._must_end_s is None:
            self._must_end_s = time.monotonic() + GRACE_S
        self._heard.set()

    def _who_left(self, words: str) -> RankLost | None:
        """Wait for a report of the lost rank; None if no rank is lost and the message did not time out."""
        self._suspects = True
        self._heard.wait(PATIENCE_S)
        if self._loss is not None:
            return RankLost(self._described(self._loss))
        if not any(word in words for word in _TIMEOUT_WORDS):
            return None
        minutes = self.config.parallel.distributed_timeout_minutes
        return RankLost(
            f"no rank has left, but one did not come to a message of {self._doing or 'this run'} within "
            f"--distributed-timeout-minutes {minutes:g}{self._last_message()}: look at what the others did meanwhile, "
            "or give more minutes if they only take long"
        )

    def _described(self, loss: Loss) -> str:
        return (
            f"{loss.describe()}. This rank cannot go on without it{self._last_message()}: mend that, and start again "
            "from the last checkpoint"
        )

    def _last_message(self) -> str:
        return "" if self._presence is None else f" (its last message: {self.watch.last_message()})"

    # The guard.

    def _guard(self) -> None:
        while not self._stop.wait(_TICK_S):
            now_s = time.monotonic()
            if self._heartbeat is not None:
                self._heartbeat.write()
            hears = None if self._pulse_stop.is_set() else self._presence
            if hears is not None and now_s - self._pulse_s > self._timeout_s + GRACE_S:
                self._pulse_s = now_s
                self._hear(hears.keeper_gone(TimeoutError("it does not answer")))
            if self._must_end_s is not None and now_s > self._must_end_s:
                self._end()
            if self._doing and not self._has_shown and now_s - self._quiet_since_s() > self._hang_s():
                self._has_shown = True
                self._show_hang(now_s - self._quiet_since_s())
        if self._heartbeat is not None:
            self._heartbeat.write()

    def _quiet_since_s(self) -> float:
        return max(self._since_s, self.watch.last_s if self._presence is not None else 0.0)

    def _hang_s(self) -> float:
        if self._presence is None:
            return 60 * self.config.training.max_step_minutes
        return HANG_SHARE * self._timeout_s

    def _show_hang(self, quiet_s: float) -> None:
        log = default_log(self.config.checkpoint.save, self.config.logging.log_jsonl)
        who = "" if self.name is None else f"{self.name}: "
        told = visible(
            f"{who}nothing has happened for {quiet_s:.0f} s in {self._doing}{self._last_message()}"
            f"{_write_flight_record(log, self.rank)}. What every thread does now:"
        )
        print(f"{told}\n{_stacks()}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        """End the process, because nothing else ends a wait for a message that never comes."""
        words = self._error_text
        if not words and self._loss is not None:
            error = RankLost(self._described(self._loss))
            error.failed_by(self.name)
            words = error_line(error)
        with contextlib.suppress(Exception):
            print(words, file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(EXIT_FAILED)


def _name_of(rank: int, host: str, at: Coordinates) -> str:
    return f"rank {rank} ({host}, tp {at.tp} cp {at.cp} pp {at.pp} dp {at.dp})"


def _stacks() -> str:
    """The stacks of all Python threads except the calling one, with the most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            found.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(found)


def _write_flight_record(log: str | None, rank: int) -> str:
    """Write torch's flight record of NCCL; returns words about its file for the end of a message, "" without a record.

    torch keeps the last 2000 messages of each rank (TORCH_FR_BUFFER_SIZE); `torchfrtrace` compares those of all ranks.
    """
    if log is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return ""
    path = Path(log).with_suffix(f".flight.rank{rank}.pickle")
    dump = getattr(_c10d, "_dump_fr_trace", None) or _c10d._dump_nccl_trace  # type: ignore[attr-defined]  # up to 2.12
    try:
        replace_file(path, dump())
    except (OSError, RuntimeError, AttributeError) as error:
        return f"; torch's flight record could not be written ({error})"
    return f"; torch's flight record: {path}"


def _is_orderly(error: BaseException) -> bool:
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def message_failure(error: BaseException) -> str | None:
    """The text of the failure of a message, if `error` or one of its causes is one; else None."""
    seen: BaseException | None = error
    while seen is not None:
        text = f"{type(seen).__name__}: {seen}"
        if isinstance(seen, RuntimeError) and any(word in text for word in _MESSAGE_WORDS):
            return text
        seen = seen.__cause__ or seen.__context__
    return None
