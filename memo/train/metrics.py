"""What a step tells: one record, written as Megatron's log line, as JSON, and to the optional trackers."""

import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from memo.config import LoggingConfig


@dataclass(frozen=True)
class StepRecord:
    """One training iteration.

    mfu_percent and tflops_per_gpu count model FLOPs alone (6 s P + 6 n h s^2 a sample, causal half of
    attention; MEMO's convention), without what is recomputed. tgs is tokens per GPU per second.
    """

    iteration: int
    consumed_samples: int
    lm_loss: float
    grad_norm: float
    lr: float
    step_time_s: float
    tgs: float
    mfu_percent: float
    tflops_per_gpu: float
    global_batch_size: int
    skipped_iterations: int
    nan_iterations: int
    device_peak_bytes: int
    host_peak_bytes: int


@dataclass(frozen=True)
class BenchmarkResult:
    """Medians over the measured steps; definitions as in StepRecord."""

    steps: int
    step_time_s: float
    tgs: float
    mfu_percent: float
    tflops_per_gpu: float
    device_peak_bytes: int
    host_peak_bytes: int


class Sink(Protocol):
    def write(self, record: StepRecord) -> None: ...
    def close(self) -> None: ...


def log_line(record: StepRecord, train_iters: int) -> str:
    """Megatron's line, plus TGS and MFU."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    fields = [
        f" [{now}] iteration {record.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.step_time_s * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {record.tflops_per_gpu:.4g}",
        f"TGS: {record.tgs:.1f}",
        f"MFU: {record.mfu_percent:.2f}%",
        f"learning rate: {record.lr:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        f"lm loss: {record.lm_loss:.6E}",
        f"grad norm: {record.grad_norm:.3f}",
        f"number of skipped iterations: {record.skipped_iterations:3d}",
        f"number of nan iterations: {record.nan_iterations:3d}",
    ]
    return " | ".join(fields) + " |"


class JsonLines:
    """One object a line at full precision; a resumed run appends."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - held for the run

    def write(self, record: StepRecord) -> None:
        self.file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(directory)

    def write(self, record: StepRecord) -> None:
        for name, value in _scalars(record).items():
            self.writer.add_scalar(name, value, record.iteration)

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, project: str, config: dict[str, Any]) -> None:
        import wandb

        self.run = wandb.init(project=project, config=config)

    def write(self, record: StepRecord) -> None:
        self.run.log(_scalars(record), step=record.iteration)

    def close(self) -> None:
        self.run.finish()


class Console:
    """Log lines on standard output, above a progress bar when standard error is a terminal."""

    def __init__(self, train_iters: int, done: int, log_interval: int, progress: bool) -> None:
        self.train_iters, self.log_interval = train_iters, log_interval
        self.bar: Any = None
        if progress and sys.stderr.isatty():
            from rich.console import Console as RichConsole
            from rich.progress import Progress

            self.bar = Progress(console=RichConsole(stderr=True), transient=True)
            self.task = self.bar.add_task("training", total=train_iters, completed=done)
            self.bar.start()

    def write(self, record: StepRecord) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=record.iteration)
        if record.iteration % self.log_interval == 0 or record.iteration == self.train_iters:
            print(log_line(record, self.train_iters), flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class Reporter:
    """All sinks of one run; only rank 0 has any. Usable as a context manager."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    @classmethod
    def for_rank(
        cls,
        rank: int,
        config: LoggingConfig,
        train_iters: int,
        done: int,
        resolved: Callable[[], dict[str, Any]],
    ) -> "Reporter":
        if rank != 0:
            return cls([])
        sinks: list[Sink] = [Console(train_iters, done, config.log_interval, config.progress)]
        if config.log_jsonl:
            sinks.append(JsonLines(config.log_jsonl))
        if config.tensorboard_dir:
            sinks.append(TensorBoard(config.tensorboard_dir))
        if config.wandb_project:
            sinks.append(WandB(config.wandb_project, resolved()))
        return cls(sinks)

    def write(self, record: StepRecord) -> None:
        for sink in self.sinks:
            sink.write(record)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self.sinks:
            sink.close()


def _scalars(record: StepRecord) -> dict[str, float]:
    values = dataclasses.asdict(record)
    del values["iteration"]
    return {name.replace("_", "-"): value for name, value in values.items()}
