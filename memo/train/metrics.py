"""Writes the record of each step: on the console, as JSON lines, and to optional trackers."""

import contextlib
import dataclasses
import errno
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memo.artifacts.regular_file import open_regular
from memo.artifacts.run_log import RunHeader, default_log, header_path
from memo.artifacts.run_log import StepRecord as StepRecord
from memo.config import RunConfig
from memo.errors import tell
from memo.spec.flops import model_flops_per_token
from memo.train.console import Console


@dataclass(frozen=True)
class BenchmarkResult:
    """Medians over the measured steps; the fields are defined in StepRecord."""

    steps: int
    step_time_s: float
    tgs: float
    mfu_percent: float | None
    tflops_per_gpu: float
    device_peak_bytes: int
    host_peak_bytes: int

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> "BenchmarkResult":
        """The medians of the records of the measured steps, of which there must be at least one."""
        median = statistics.median
        mfu_percent = [r.mfu_percent for r in records if r.mfu_percent is not None]
        return cls(
            steps=len(records),
            step_time_s=median(r.step_time_s for r in records),
            tgs=median(r.tgs for r in records),
            mfu_percent=median(mfu_percent) if mfu_percent else None,
            tflops_per_gpu=median(r.tflops_per_gpu for r in records),
            device_peak_bytes=records[-1].device_peak_bytes,
            host_peak_bytes=records[-1].host_peak_bytes,
        )


class Sink(Protocol):
    """A destination of records. Any call may raise: the Reporter prints that once and goes on with the next record."""

    name: str
    """The flag or name by which the user knows it."""

    def write(self, record: StepRecord) -> None: ...
    def write_evaluation(self, iteration: int, found: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """A log with one JSON object per line, and the run's header in another file (memo.artifacts.run_log).

    A resumed run appends to its log.
    """

    def __init__(self, name: str, path: str, header: RunHeader | None = None) -> None:
        self.name = name
        if header is not None:
            header.save(header_path(path))
        descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.file = open(descriptor, "ab", buffering=0)  # noqa: SIM115 - held for the run

    def write(self, record: StepRecord) -> None:
        self._write(dataclasses.asdict(record))

    def write_evaluation(self, iteration: int, found: dict[str, Any]) -> None:
        self._write({"iteration": iteration, "evaluation": found})

    def _write(self, content: dict[str, Any]) -> None:
        """Append a whole line or nothing, so that the next line does not follow half of this one."""
        line, size = f"{json.dumps(content)}\n".encode(), os.fstat(self.file.fileno()).st_size
        if self.file.write(line) != len(line):  # the disk is full
            self.file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    def __init__(self, name: str, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.name = name
        self.writer = SummaryWriter(directory)

    def write(self, record: StepRecord) -> None:
        for name, value in _scalars(record).items():
            self.writer.add_scalar(name, value, record.iteration)

    def write_evaluation(self, iteration: int, found: dict[str, Any]) -> None:
        self.writer.add_scalar(_loss_name(found), found["loss"], iteration)

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, name: str, project: str, config: dict[str, Any]) -> None:
        import wandb

        self.name = name
        self.run = wandb.init(project=project, config=config)

    def write(self, record: StepRecord) -> None:
        self.run.log(_scalars(record), step=record.iteration)

    def write_evaluation(self, iteration: int, found: dict[str, Any]) -> None:
        self.run.log({_loss_name(found): found["loss"]}, step=iteration)

    def close(self) -> None:
        self.run.finish()


class Reporter:
    """All sinks of one run; only rank 0 has any. It is a context manager that closes them."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self._warned: set[str] = set()

    @classmethod
    def for_rank(cls, is_main_rank: bool, config: RunConfig, done: int, header: Callable[[], RunHeader]) -> "Reporter":
        """The sinks that `config` asks for.

        Args:
            done: iterations that were complete before this start.
            header: makes the header; called only if a log is written.
        """
        if not is_main_rank:
            return cls()
        reporter, logging = cls.of_log(config, header), config.logging
        reporter.sinks.append(Console(config, done))
        if (folder := logging.tensorboard_dir) is not None:
            reporter.add(f"--tensorboard-dir {folder}", lambda name: TensorBoard(name, folder))
        if (project := logging.wandb_project) is not None:
            reporter.add(f"--wandb-project {project}", lambda name: WandB(name, project, dataclasses.asdict(config)))
        return reporter

    @classmethod
    def of_log(cls, config: RunConfig, header: Callable[[], RunHeader] | None = None) -> "Reporter":
        """The log alone, for what is told outside of train(), which also writes its header and tells the trackers."""
        reporter = cls()
        log = default_log(config.checkpoint.save, config.logging.log_jsonl)
        if log is not None:
            reporter.add(f"the log {log}", lambda name: JsonLines(name, log, header and header()))
        return reporter

    def add(self, name: str, make: Callable[[str], Sink]) -> None:
        """Add the sink that make(name) opens; if that fails, the run goes on without it after a warning."""
        with self._going_on(name):
            self.sinks.append(make(name))

    def write(self, record: StepRecord) -> None:
        for sink in self.sinks:
            with self._going_on(sink.name):
                sink.write(record)

    def write_evaluation(self, iteration: int, found: dict[str, Any]) -> None:
        """Report an evaluation; `found` can be written as JSON and has at least "loss", in nats per token.

        The name of its evaluation set, if it has one, is under "data".
        """
        for sink in self.sinks:
            with self._going_on(sink.name):
                sink.write_evaluation(iteration, found)

    @contextlib.contextmanager
    def _going_on(self, name: str) -> Iterator[None]:
        """Turn an error of a sink into a warning, printed once per sink, because no log is worth the end of a run."""
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

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self.sinks:
            with self._going_on(sink.name):
                sink.close()


def _loss_name(found: dict[str, Any]) -> str:
    """Of the loss of an evaluation, as trackers show it."""
    return f"validation-loss/{found['data']}" if "data" in found else "validation-loss"


def speed(config: RunConfig, samples_per_s: float, peak_flops: float) -> dict[str, Any]:
    """The speeds among StepRecord's fields; `samples_per_s`: samples per second of a step, divided by all ranks."""
    seq_length = config.data.seq_length
    tgs = samples_per_s * seq_length
    flops = tgs * model_flops_per_token(config.model, seq_length)
    # The peak of a CPU is a measurement, and one that a step exceeds is none: a share of either would mislead.
    has_peak = config.hardware.device != "cpu" and flops <= peak_flops
    return {"tgs": tgs, "mfu_percent": 100.0 * flops / peak_flops if has_peak else None, "tflops_per_gpu": flops / 1e12}


def _scalars(record: StepRecord) -> dict[str, float]:
    """The record's values by the names that trackers show, without those that were not measured."""
    values = dataclasses.asdict(record)
    del values["iteration"]
    return {_shown_name(name): value for name, value in values.items() if value is not None}


def _shown_name(field: str) -> str:
    """Rewards are called as TRL calls them, rewards/margins."""
    return field.replace("rewards_", "rewards/").replace("_", "-")
