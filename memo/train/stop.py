"""Signals that ask a run to end: a scheduler's SIGTERM, and the SIGINT of Ctrl-C.

    first signal     the current step is finished, a checkpoint is saved, exit status 0
    second signal    the process ends at once

A handler only sets a flag, on which the ranks agree after each step. Python runs handlers between two Python
instructions, so a rank that waits in a collective runs none. Therefore a thread reads the second signal from the
descriptor to which the interpreter writes as soon as a signal comes. This file does not import torch, because torch
takes seconds to load and a signal may come meanwhile.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from memo.errors import is_reporting_rank

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_S = 0.2
"""A signal within this time after the first is an echo of the first: GNU timeout sends a signal to its child and then
to the child's process group."""


class GracefulStop:
    """SIGTERM or SIGINT to any rank ends training on all of them, after the same step.

    Attributes:
        requested: whether this rank got a signal or a request.
        agreed: whether all ranks have agreed to end; set by the caller after the agreement.
        signal_name: the signal or the name of the request that this rank got; None without one.
    """

    def __init__(self) -> None:
        self.requested = self.agreed = False
        self.signal_name: str | None = None
        self._is_listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator["GracefulStop"]:
        """A context in which signals are noted, after earlier ones are forgotten; a nested context does nothing.

        Python allows handlers only in the main thread; in any other thread this does nothing.
        """
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            yield self
            return
        self.requested = self.agreed = False
        self.signal_name = None
        read, write = os.pipe()
        os.set_blocking(write, False)
        previous_descriptor = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        previous = {number: signal.signal(number, self._request) for number in SIGNALS}
        thread = threading.Thread(target=_watch, args=(read,), name="memo-signals", daemon=True)
        thread.start()
        self._is_listening = True
        try:
            yield self
        finally:
            self._is_listening = False
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_descriptor)
            os.write(write, b"\0")  # closing would not end the thread if a forked child holds the pipe open
            thread.join()
            os.close(read)
            os.close(write)

    def request(self, name: str) -> None:
        """Ask for the end as a signal would; `name` says who asked."""
        self.signal_name = self.signal_name or name
        self.requested = True

    def _request(self, number: int, _: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self.requested = True


def _watch(read: int) -> None:
    """Report the first signal, and end the process at the second. Each byte read is a signal's number; 0: return."""
    first_s: float | None = None
    while True:
        number = os.read(read, 1)[0]
        if number == 0:
            return
        if number not in SIGNALS:
            continue
        name = signal.Signals(number).name
        if first_s is None:
            first_s = time.monotonic()
            if is_reporting_rank():
                _print(f"{name}: this run ends after the step that it is in; a second signal ends it at once")
        elif time.monotonic() - first_s > ECHO_S:
            rank = os.environ.get("RANK", "0")
            _print(f"{name} after a first signal: rank {rank} ends at once, and what it has not saved is lost")
            os._exit(128 + number)  # as a shell reports a process that a signal ended


def _print(text: str) -> None:
    """Print on standard error, without the locks of Python's own stream, which the main thread may hold."""
    with contextlib.suppress(OSError):  # the reader may be gone
        os.write(2, f"{text}\n".encode())
