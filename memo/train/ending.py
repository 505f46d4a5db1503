"""How a run ends before its last step, and how its process groups do."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist


class GracefulStop:
    """SIGTERM to any rank ends training on all of them, after the same step.

    Attributes:
        requested: this rank was asked to.
        agreed: all ranks know of it, and end; set by whoever lets them talk.
    """

    def __init__(self) -> None:
        self.requested = self.agreed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handlers exist only in the main thread; in another this listens to nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(_: int, __: FrameType | None) -> None:
            self.requested = True

        self.requested = self.agreed = False
        previous = signal.signal(signal.SIGTERM, request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)


def shutdown() -> None:
    """End the process groups, if any were started; let go before of what holds them (Trainer.close() does both).

    gloo's threads free the tensors of the last messages when they get to it. One that does so while the
    interpreter ends aborts the process (exit status -6), so groups, and with them their threads, end here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # a model is a reference cycle; threads end with the last reference to their group
