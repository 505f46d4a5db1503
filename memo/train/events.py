"""The events that the training loop announces, and who listens; nothing else in the loop prints or writes a log.

    event                      the loop says                  who listens
    a step was taken           stepped(record)                console, log, trackers; the history; callbacks; after
                                                              the first steps the plan of memory is told
    losses on held-out data    evaluated(iteration, found)    console, log, trackers; the history
    a checkpoint               saved(iteration, path)         the last line of the run
    no more steps              `with` ends                    console, log, trackers close
    all is on disk             ended(iteration, by whom)      standard output

The time and memory of a step are watched inside it: memo.train.oom, memo.train.watching and memo.train.watchdog.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import methodcaller
from pathlib import Path
from typing import Protocol

from memo.artifacts.run_log import RunHeader, StepRecord, default_log, header_path
from memo.errors import tell
from memo.train.console import Console, describe_end, say
from memo.train.ending import stopped
from memo.train.evaluation import Evaluated, loss_of
from memo.train.history import History
from memo.train.metrics import JsonLines, TensorBoard, WandB
from memo.train.parallel_model import ParallelModel
from memo.train.planned_memory import Transients

Callback = Callable[[StepRecord], None]


class Sink(Protocol):
    """A place to which rank 0 writes. Any call may raise; the user is told once, and the next event is tried again."""

    name: str
    """The flag or the name by which users know this sink."""

    def stepped(self, record: StepRecord) -> None: ...
    def evaluated(self, iteration: int, name: str, found: Evaluated) -> None: ...
    def close(self) -> None: ...


class Events:
    """A context manager that passes events on to the sinks and closes them at its end; only rank 0 has sinks.
    `history` is the result of train(), `saved_at` the iteration of the last checkpoint of this start, if any."""

    def __init__(self, parts: ParallelModel, callbacks: Sequence[Callback] = ()) -> None:
        self.history, self._parts, self._callbacks = History(), parts, callbacks
        self.saved_at: int | None = None
        self._saved: Path | None = None
        self._sinks: list[Sink] = []
        self._tell_plan: Callable[[], None] | None = None
        self._warned: set[str] = set()

    def open_log(self, header: Callable[[], RunHeader] | None = None) -> None:
        """Open the file of --log-jsonl, if there is one; `header` makes the header of a run that begins."""
        config = self._parts.config
        log = default_log(config.checkpoint.save, config.logging.log_jsonl)
        if log is not None:
            self._open(f"the log {log}", lambda name: JsonLines(name, log, header and header()))

    def open_all(self, done: int, header: Callable[[], RunHeader]) -> None:
        """Open all sinks that the run asks for. `done`: iterations completed before this start; `header` makes the
        header, and is called only if a log is written."""
        config, logging = self._parts.config, self._parts.config.logging
        self.open_log(header)
        if self._parts.transients is not None and self._parts.transients.is_learning:
            self._tell_plan = functools.partial(self._planned, self._parts.transients, header)
        self._sinks.append(Console(config, done))
        if (folder := logging.tensorboard_dir) is not None:
            self._open(f"--tensorboard-dir {folder}", lambda name: TensorBoard(name, folder))
        if (project := logging.wandb_project) is not None:
            self._open(f"--wandb-project {project}", lambda name: WandB(name, project, asdict(config)))

    def stepped(self, record: StepRecord) -> None:
        """A step of train() has been taken. Raises what callbacks raise."""
        self._tell(methodcaller("stepped", record))
        if self._tell_plan is not None and record.iteration < self._parts.config.training.train_iters:
            self._tell_plan()
        self.history.add(record)
        for callback in self._callbacks:
            callback(record)

    def _planned(self, transients: Transients, header: Callable[[], RunHeader]) -> None:
        """Tell the plan of memory once it is made from the first steps; the header of the log gets it too."""
        if transients.is_learning:
            return
        self._tell_plan = None
        say(f"memory of a step: {transients.headline()}")
        config = self._parts.config
        if (log := default_log(config.checkpoint.save, config.logging.log_jsonl)) is not None:
            with self._going_on(f"the log {log}"):
                header().save(header_path(log))

    def evaluated(self, iteration: int, found: Mapping[str, Evaluated], at_end: bool = False) -> None:
        """Evaluations by the name of their set, which may be ""; the history keeps the first set, except `at_end`."""
        for name, each in found.items():
            self._tell(methodcaller("evaluated", iteration, name, each))
        if not at_end:
            self.history.evaluations.append((iteration, loss_of(next(iter(found.values())))))

    def saved(self, iteration: int, path: Path) -> None:
        """A checkpoint has been written, or under --async-save begun."""
        self.saved_at, self._saved = iteration, path

    def ended(self, iteration: int, stopped_by: str) -> None:
        """train() is over, and its checkpoints are on disk; `stopped_by`: who ended it early, "" if nobody did."""
        parts, config = self._parts, self._parts.config
        if not parts.mesh.is_main_rank:
            return
        if parts.transients is not None:
            say(parts.transients.report())
        if stopped_by:
            say(stopped(config, stopped_by, iteration, self._saved))
        else:
            say(describe_end(config, self.history, iteration, parts.device.type == "cpu", self._saved))

    def _open(self, name: str, make: Callable[[str], Sink]) -> None:
        """Add the sink make(name); if that fails, warn and go on without it."""
        with self._going_on(name):
            self._sinks.append(make(name))

    def _tell(self, event: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            with self._going_on(sink.name):
                event(sink)

    @contextlib.contextmanager
    def _going_on(self, name: str) -> Iterator[None]:
        """Turn an error of a sink into a warning, printed once per sink: a run shall not end because a log fails."""
        try:
            yield
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                with contextlib.suppress(OSError, ValueError):  # standard error may be gone as well
                    tell(
                        f"warning: {name} cannot be written ({error}): training goes on, and what fails is missing "
                        "there; this is told once"
                    )

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        self._tell(methodcaller("close"))
