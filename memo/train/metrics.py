"""Sinks of step records: a log of JSON lines and optional trackers (memo.train.events); and results of benchmarks."""

import dataclasses
import errno
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memo.artifacts.regular_file import open_regular
from memo.artifacts.run_log import RunHeader, header_path
from memo.artifacts.run_log import StepRecord as StepRecord
from memo.config import RunConfig
from memo.spec.flops import model_flops_per_token
from memo.train.evaluation import Evaluated, LossByPosition, loss_of


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
        """The medians over the records of the measured steps; at least one record."""
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


class JsonLines:
    """A log with one JSON object per line; the run's header has its own file (memo.artifacts.run_log).

    A resumed run appends to its log.
    """

    def __init__(self, name: str, path: str, header: RunHeader | None = None) -> None:
        self.name = name
        if header is not None:
            header.save(header_path(path))
        descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.file = open(descriptor, "ab", buffering=0)  # noqa: SIM115 - held for the run

    def stepped(self, record: StepRecord) -> None:
        self._write(dataclasses.asdict(record))

    def evaluated(self, iteration: int, name: str, found: Evaluated) -> None:
        losses = dataclasses.asdict(found) if isinstance(found, LossByPosition) else {"loss": found}
        self._write({"iteration": iteration, "evaluation": losses | ({"data": name} if name else {})})

    def _write(self, content: dict[str, Any]) -> None:
        """Append a whole line or nothing, so that no half line stays before the next line."""
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

    def stepped(self, record: StepRecord) -> None:
        for name, value in _scalars(record).items():
            self.writer.add_scalar(name, value, record.iteration)

    def evaluated(self, iteration: int, name: str, found: Evaluated) -> None:
        self.writer.add_scalar(_loss_name(name), loss_of(found), iteration)

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, name: str, project: str, config: dict[str, Any]) -> None:
        import wandb

        self.name = name
        self.run = wandb.init(project=project, config=config)

    def stepped(self, record: StepRecord) -> None:
        self.run.log(_scalars(record), step=record.iteration)

    def evaluated(self, iteration: int, name: str, found: Evaluated) -> None:
        self.run.log({_loss_name(name): loss_of(found)}, step=iteration)

    def close(self) -> None:
        self.run.finish()


def _loss_name(data: str) -> str:
    """The name of an evaluation's loss in trackers."""
    return f"validation-loss/{data}" if data else "validation-loss"


def speed(config: RunConfig, samples_per_s: float, peak_flops: float) -> dict[str, Any]:
    """The speeds among StepRecord's fields; `samples_per_s`: samples per second of a step and rank."""
    seq_length = config.data.seq_length
    tgs = samples_per_s * seq_length
    flops = tgs * model_flops_per_token(config.model, seq_length)
    # A share of a CPU's measured peak, or of a peak that a step exceeds, would mislead.
    has_peak = config.hardware.device != "cpu" and flops <= peak_flops
    return {"tgs": tgs, "mfu_percent": 100.0 * flops / peak_flops if has_peak else None, "tflops_per_gpu": flops / 1e12}


def _scalars(record: StepRecord) -> dict[str, float]:
    """The measured values of a record by the names that trackers show; rewards have TRL's, such as rewards/margins."""
    values = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
    del values["iteration"]
    return {name.replace("rewards_", "rewards/").replace("_", "-"): value for name, value in values.items()}
