"""Signals that ask a run to end: a scheduler's SIGTERM, and the SIGINT of Ctrl-C.

    first signal     the step in hand is finished, a checkpoint is saved, exit status 0
    second signal    the process ends at once

A handler only sets a flag, on which the ranks agree after each step. Python runs handlers between two of its own
instructions, so a rank that waits in a collective would never run one: the second signal is read by a thread, from the
descriptor that the interpreter writes to as soon as a signal comes. No torch here: it takes seconds to load, and
signals may come meanwhile.
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
"""What comes so soon after the first is the same signal once more: GNU timeout, for one, sends it to its child and then
to its group."""


class GracefulStop:
    """SIGTERM or SIGINT to any rank ends training on all of them, after the same step.

    Attributes:
        requested: this rank was asked to.
        agreed: all ranks know of it, and end; set by whoever lets them talk.
        signal_name: what asked this rank; None if nothing did.
    """

    def __init__(self) -> None:
        self.requested = self.agreed = False
        self.signal_name: str | None = None
        self._is_listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator["GracefulStop"]:
        """From here on no signal is older than this call; inside another listening() of the same stop a no-op.

        Handlers exist only in the main thread; in another this listens to nothing.
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
            os.write(write, b"\0")  # closing would not do: a forked child may hold the pipe open
            thread.join()
            os.close(read)
            os.close(write)

    def _request(self, number: int, _: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self.requested = True


def _watch(read: int) -> None:
    """Tell the first signal, end the process at the second; a byte is a signal's number, 0 the end."""
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
                _tell(f"{name}: this run ends after the step that it is in; a second signal ends it at once")
        elif time.monotonic() - first_s > ECHO_S:
            rank = os.environ.get("RANK", "0")
            _tell(f"{name} after a first signal: rank {rank} ends at once, and what it has not saved is lost")
            os._exit(128 + number)  # as a shell reports a process that a signal ended


def _tell(text: str) -> None:
    """On standard error, whatever the main thread is doing with it."""
    with contextlib.suppress(OSError):  # whoever read it may be gone
        os.write(2, f"{text}\n".encode())
