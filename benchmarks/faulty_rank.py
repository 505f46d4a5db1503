"""Runs one rank with a fault at a given place; benchmarks/kill_campaign.py starts it as the victim of a run.

    python benchmarks/faulty_rank.py PLACE CALL FAULT MARK FLAGS...

At the CALL-th call of PLACE the process writes the file MARK and does FAULT to itself: a signal by its name, `error`
(one of memo's errors), or `bug` (any other exception).
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memo.checkpoint import writer
from memo.errors import DataError
from memo.executor.states import StateStreamer
from memo.executor.swapper import Swapper
from memo.parallel.main_gradients import MainGradients
from memo.train.entry import main
from memo.train.trainer import Trainer

PLACES: dict[str, tuple[Any, str]] = {
    "start": (Trainer, "_load"),
    "step": (MainGradients, "finish_reduction"),
    "offload": (Swapper, "end"),
    "streamed states": (StateStreamer, "end"),
    "save": (writer, "write_values"),
    "last save": (writer, "write_values"),
}
"""The function that is called at each place; "last save" counts only calls for the checkpoint of the last iteration."""


def meet(fault: str, mark: Path) -> None:
    """Do the fault. Returns only after a signal that a run survives for a while."""
    mark.touch()
    if fault == "error":
        raise DataError("a document of this rank is damaged: this is a fault on purpose")
    if fault == "bug":
        raise KeyError("a fault on purpose")
    os.kill(os.getpid(), signal.Signals[fault])


def lay(place: str, call: int, fault: Callable[[], None], last_checkpoint: str) -> None:
    """Patch the function of a place so that its `call`-th call does the fault."""
    owner, name = PLACES[place]
    inner, calls = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if place != "last save" or last_checkpoint in args[0].name:
            calls += 1
            if calls == call:
                fault()
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    _, place, call, fault, mark, *flags = sys.argv
    last = int(flags[flags.index("--train-iters") + 1])
    lay(place, int(call), lambda: meet(fault, Path(mark)), f"iter_{last:07d}")
    raise SystemExit(main(flags))
