"""The output of a run on the terminal: log lines, a progress bar, and a summary at the end."""

import contextlib
import datetime
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memo.artifacts.run_log import StepRecord
from memo.config import RunConfig
from memo.config.run import LogFormat
from memo.train.evaluation import Evaluated, LossByPosition, loss_of, perplexity
from memo.train.history import History
from memo.units import format_bytes, format_duration_s


def say(text: str) -> None:
    """Print a line on standard output; if that fails (a full disk, a closed pipe), the run goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def log_line(record: StepRecord, train_iters: int, form: LogFormat = "short") -> str:
    """The log line of one iteration: at most 120 columns, or Megatron-LM's line with TGS and MFU added."""
    return _megatron_line(record, train_iters) if form == "megatron" else _short_line(record, train_iters)


def _short_line(record: StepRecord, train_iters: int) -> str:
    """Fields that few iterations have, such as the count of skipped ones, may make the line longer than 120 columns."""
    now, width = datetime.datetime.now().strftime("%m-%d %H:%M:%S"), len(str(train_iters))
    step_s = record.step_time_s
    fields = [
        f"{now} iteration {record.iteration:{width}d}/{train_iters}",
        f"loss {record.lm_loss:.4f}",
        f"grad norm {record.grad_norm:.4g}",
        f"lr {record.lr:.2e}",
        f"{step_s * 1e3:.0f} ms" if step_s < 1 else format_duration_s(step_s),
        f"TGS {record.tgs:,.0f}",
    ]
    mfu = [] if record.mfu_percent is None else [f"MFU {record.mfu_percent:.1f}%"]
    skipped = [f"{record.skipped_iterations} skipped"] if record.skipped_iterations else []
    return " | ".join(
        fields + mfu + _rewards(record) + _routers(record, ("balance", "z", "imbalance"), "{} {:.3g}") + skipped
    )


def _rewards(record: StepRecord) -> list[str]:
    """The rewards of preference training, by TRL's names."""
    values = {"rewards/margins": record.rewards_margins, "rewards/accuracies": record.rewards_accuracies}
    return [f"{name} {value:.4g}" for name, value in values.items() if value is not None]


def _routers(record: StepRecord, names: Sequence[str], form: str) -> list[str]:
    """The losses of routers and the load imbalance of experts, if the model has experts."""
    values = (record.load_balancing_loss, record.z_loss, record.load_imbalance)
    return [form.format(name, value) for name, value in zip(names, values, strict=True) if value is not None]


def _megatron_line(record: StepRecord, train_iters: int) -> str:
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    fields = [
        f" [{now}] iteration {record.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.step_time_s * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {record.tflops_per_gpu:.4g}",
        f"TGS: {record.tgs:.1f}",
        *([] if record.mfu_percent is None else [f"MFU: {record.mfu_percent:.2f}%"]),
        f"learning rate: {record.lr:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        f"lm loss: {record.lm_loss:.6E}",
        *_rewards(record),
        *_routers(record, ("load_balancing_loss", "z_loss", "load imbalance"), "{}: {:.6E}"),
        f"grad norm: {record.grad_norm:.3f}",
        f"number of skipped iterations: {record.skipped_iterations:3d}",
        f"number of nan iterations: {record.nan_iterations:3d}",
    ]
    return " | ".join(fields) + " |"


class Console:
    """Log lines on standard output, above a progress bar when standard error is a terminal."""

    name = "standard output"

    def __init__(self, config: RunConfig, done: int) -> None:
        """`done`: iterations completed before this start."""
        logging, self.train_iters = config.logging, config.training.train_iters
        self.log_interval, self.form = logging.log_interval, logging.log_format
        self.bar: Any = None
        if logging.progress and sys.stderr.isatty() and done < self.train_iters:
            self.bar, self.task = _progress_bar(self.train_iters, done)
            self.bar.start()

    def stepped(self, record: StepRecord) -> None:
        if self.bar is not None:
            figures = f"loss {record.lm_loss:.4f}  {record.tgs:,.0f} tokens/s/GPU"
            self.bar.update(self.task, completed=record.iteration, figures=figures)
        if record.iteration % self.log_interval == 0 or record.iteration == self.train_iters:
            print(log_line(record, self.train_iters, self.form), flush=True)

    def evaluated(self, iteration: int, name: str, found: Evaluated) -> None:
        loss, name = loss_of(found), name or "validation"
        if self.form == "megatron":
            text = f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | "
            text += f"lm loss PPL: {perplexity(loss):.6E} |"
        else:
            text = f"{name} loss {loss:.4f}, perplexity {perplexity(loss):.4g}, at iteration {iteration}"
        print(text, flush=True)
        if isinstance(found, LossByPosition):
            print(found.table(), flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _progress_bar(train_iters: int, done: int) -> tuple[Any, Any]:
    """Return a bar on standard error and its task; it shows iterations, the remaining time, loss and speed."""
    from rich import progress as rich
    from rich.console import Console as RichConsole

    what, figures = rich.TextColumn("training"), rich.TextColumn("{task.fields[figures]}")
    counts = what, rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn()
    rest = rich.TextColumn("ETA"), rich.TimeRemainingColumn(), figures
    bar = rich.Progress(*counts, *rest, console=RichConsole(stderr=True), transient=True)
    return bar, bar.add_task("training", total=train_iters, completed=done, figures="")


def describe_end(config: RunConfig, history: History, iteration: int, is_on_cpu: bool, saved: Path | None) -> str:
    """Return a summary of train(): iterations up to `iteration`, time, memory, the last checkpoint of this start, and
    the command to run next."""
    last = history.last
    if last is None:
        load = config.checkpoint.load
        return (
            f"nothing is left to train: {'this Trainer' if load is None else f'--load {load}'} is at iteration "
            f"{iteration}, and --train-iters is {config.training.train_iters}: give a larger one to go on"
        )
    loss = f"loss {last.lm_loss:.4f}"
    if history.evaluations:
        loss += f", validation loss {history.evaluations[-1][1]:.4f}"
    tokens = history.num_steps * last.global_batch_size * config.data.seq_length
    peaks = format_bytes(last.host_peak_bytes)
    if not is_on_cpu:  # there one resident set holds everything
        peaks = f"{format_bytes(last.device_peak_bytes)} of the device, {peaks} of the host"
    lines = [
        f"trained {history.num_steps:,} iterations, {tokens:,} tokens, in "
        f"{format_duration_s(history.trained_s)}: {loss}",
        f"peak memory of rank 0: {peaks}",
    ]
    return "\n".join([*lines, *_next(config, saved)])


def _next(config: RunConfig, saved: Path | None) -> Sequence[str]:
    if saved is None:
        return ["nothing is saved: --save was not given"] if config.checkpoint.save is None else []
    save = shlex.quote(str(config.checkpoint.save))
    log = shlex.quote(config.logging.log_jsonl or str(config.checkpoint.save))
    needs = "" if find_spec("matplotlib") else " (after pip install 'memo-train[report]')"
    return [
        f"checkpoint: {saved}",
        f"next: `memo report {log}` draws this run{needs}, `memo export {save} --out DIR` writes its weights for "
        "Hugging Face",
    ]
