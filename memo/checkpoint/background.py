"""Writes a checkpoint in a thread while training goes on, until the next change of the saved tensors.

    training   | step 100 | save | forward, backward of step 101 | wait | update | step 102 ...
    thread                       | read and write masters, moments      | all ranks done? publish |

Masters and moments change only in the optimizer's update, so they need not be copied first: the thread reads them in
place, and the next update waits until it has read them all. If a step takes longer than writing the part of one rank,
as on long sequences, no update waits.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class BackgroundWriter:
    """Runs one write at a time in a thread.

    It takes no host memory beyond that of a write (PIECE_BYTES in writer.py). The thread is no daemon: an interpreter
    that ends waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread: threading.Thread | None = None
        self._was_read = threading.Event()
        self._was_read.set()
        self._error: BaseException | None = None
        self._began_s = self._waited_s = 0.0
        self._waiting_since_s: float | None = None

    def start(self, write: Callable[[Callable[[], None]], None]) -> None:
        """Call write(on_read) in the thread; `write` must call on_read() once it has read all that may change later.

        On CUDA its copies run on a separate stream, after all work that is queued on the current stream now. This
        first waits for the previous write, and raises its error.
        """
        self.finish()
        self._was_read.clear()
        self._began_s, self._waited_s = time.perf_counter(), 0.0
        now = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, args=(write, now), name="memo-save")
        self._thread.start()

    def wait_until_read(self) -> None:
        """Wait until the tensors that are being written may change; returns at once if nothing is being written."""
        self._waiting_since_s = time.perf_counter()
        self._was_read.wait()
        self._waiting_since_s = None

    def times_s(self) -> tuple[float, float]:
        """(seconds since start(), seconds that wait_until_read() took); `write` calls it, after on_read()."""
        return time.perf_counter() - self._began_s, self._waited_s

    @property
    def failed(self) -> bool:
        """Whether finish() would raise; never waits."""
        return self._error is not None

    def finish(self) -> None:
        """Wait for the write, if there is one. Raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[Callable[[], None]], None], after: torch.cuda.Event | None) -> None:
        try:
            with _own_stream(self.device, after):
                write(self._release)
        except BaseException as error:
            self._error = error
        finally:
            self._was_read.set()  # a write that has failed must not block an update

    def _release(self) -> None:
        since_s = self._waiting_since_s
        if since_s is not None:
            self._waited_s = time.perf_counter() - since_s
        self._was_read.set()


@contextmanager
def _own_stream(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """Run copies from the device on a separate stream. Sets the device, because a new thread begins on device 0."""
    if after is None:
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield
