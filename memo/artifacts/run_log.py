"""The log of a training run: a line of JSON for each iteration, and a file that describes the run.

    log.jsonl       {"iteration": 1, "consumed_samples": 8, "lm_loss": 10.8, ...}     one StepRecord a line, appended
                    {"iteration": 100, "evaluation": {"loss": 2.1, ...}}              after each evaluation
    log.run.json    {"schema": "run", "version": 1, "config": {...}, ...}             one RunHeader, the latest start

A resumed run appends, beginning with the iteration after its checkpoint. A reader then ignores earlier lines about this
iteration and later iterations, and likewise for evaluations. A run that was killed may leave half a line at the end,
which is ignored as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memo.artifacts.artifact import Artifact
from memo.artifacts.fields import AnyFloat, Count, Time, build, checked
from memo.artifacts.reading import Source, opened, parse_json, read_lines
from memo.errors import ArtifactError

_LONGEST_LINE_BYTES = 1 << 20
"""Limit of a line; the line of an iteration has a kilobyte."""


@dataclass(frozen=True)
class StepRecord:
    """One training iteration. Values that differ between ranks are rank 0's; None means not measured in this iteration.

    mfu_percent and tflops_per_gpu count only model FLOPs (6 s P + 6 n h s^2 for each sample, causal half of attention;
    MEMO's convention), without recomputation. tgs is tokens per GPU and second. mfu_percent is None on CPUs, and if a
    step is faster than the given or measured peak, which then is not a peak.

    Attributes:
        step_time_s: seconds from the beginning to the end of a step on the host. On CUDA the update of the weights may
            still run at the end; the next step waits for it.
        device_peak_bytes, host_peak_bytes: peaks of this process so far; on a CPU both are the peak of its resident
            set.
        weights_bytes, gradients_bytes, optimizer_bytes: bytes of this rank's shards in memory.
        rounding_buffers_bytes: slots and workspace of a swap plan, and slots of streamed states.
        host_records_bytes: activations and states in host memory.
        transient_peak_bytes: the peak so far of all other memory of a step: activations that stay, working sets, the
            loss, buffers of communication. On a CPU it is the peak of the resident set minus the other components and
            the process itself (352 MiB or more): rough, and too small for tiny models.
        layers_s: seconds of a step in which the compute stream runs layers under a swap plan.
        copy_wait_s: seconds for which the compute stream waits for copies of layers.
        copies_s: seconds of the copies in both directions together.
        hidden_share: share of copies_s during which a layer computes, 0 to 1.
        state_copies_s: seconds of a step's copies of streamed states in both directions together (--offload-states).
            Copies of the optimizer's step that are pending at its end count in the next record with this field.
        state_wait_s: seconds for which the compute stream, or the CPU after the last backward, waits for copies of
            states.
        host_update_s: seconds that the CPU takes to update states in host memory.
        planned_peak_bytes: the most bytes in use at planned addresses (--memory-planner).
        fallbacks: requests so far that differed from the plan and were served by torch's allocator.
        load_imbalance: the most tokens of an expert divided by the mean over the experts of its layer; 1: balanced.
        load_balancing_loss, z_loss: losses of routers, means over layers, before they are multiplied by their
            coefficients (--moe-aux-loss-coeff, --moe-z-loss-coeff); not part of lm_loss.
        rewards_chosen, rewards_rejected: with --preference, whose loss then is lm_loss: beta times (log p of an answer
            minus log p of the reference), means over the pairs of the global batch.
        rewards_margins: rewards_chosen minus rewards_rejected.
        rewards_accuracies: the share of pairs, 0 to 1, whose chosen answer has the larger reward.
    """

    iteration: Count
    consumed_samples: Count
    lm_loss: AnyFloat
    grad_norm: AnyFloat
    lr: float
    step_time_s: float
    tgs: float
    mfu_percent: float | None
    tflops_per_gpu: float
    global_batch_size: int
    skipped_iterations: int
    nan_iterations: int
    device_peak_bytes: int
    host_peak_bytes: int
    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    rounding_buffers_bytes: int | None = None
    host_records_bytes: int | None = None
    transient_peak_bytes: int | None = None
    layers_s: float | None = None
    copy_wait_s: float | None = None
    copies_s: float | None = None
    hidden_share: float | None = None
    state_copies_s: float | None = None
    state_wait_s: float | None = None
    host_update_s: float | None = None
    planned_peak_bytes: int | None = None
    fallbacks: int | None = None
    load_imbalance: AnyFloat | None = None
    load_balancing_loss: AnyFloat | None = None
    z_loss: AnyFloat | None = None
    rewards_chosen: AnyFloat | None = None
    rewards_rejected: AnyFloat | None = None
    rewards_margins: AnyFloat | None = None
    rewards_accuracies: AnyFloat | None = None


@dataclass(frozen=True)
class SwapForecast:
    """The forecast of rank 0's swap plan; unless stated otherwise, times are for one layer and microbatch.

    Attributes:
        moves: False if everything fits on the device, so that nothing moves.
        shares: share of the tokens that move, by group of tensors (memo.spec.skeleton).
        copies_s: seconds of all copies of a step in both directions, if nothing else runs.
        layers_s: seconds of all forwards, backwards and recomputation of layers in a step.
        copy_wait_s: seconds of a step for which layers wait for copies.
    """

    moves: bool
    origin: str
    limit: str
    shares: dict[str, float]
    forward_s: float
    backward_s: float
    recompute_s: float
    layers_s: AnyFloat
    copies_s: AnyFloat
    copy_wait_s: AnyFloat
    hidden_share: AnyFloat
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class RunHeader(Artifact):
    """A description of the run, written when training starts and again when it is resumed.

    Attributes:
        started_at: local time with its UTC offset, ISO 8601.
        versions: versions of memo, torch and python.
        config: the resolved configuration by section, as in config.toml.
        layout: tp, cp, pp, dp, world size, microbatches.
        peak_flops: peak of one device, to which MFU refers.
        memory_forecast: bytes of rank 0 by component, as estimated before training: weights, gradients, optimizer,
            rounding_buffers, transient, host_records and others.
        memory_plan: planner, proof, arena_bytes and lower_bound_bytes of --memory-planner; None without it.
        attention: name of the kernels and the reason for the choice; None in files of older versions.
        host, command: rank 0's host and its command line for a shell; None in files of older versions.
    """

    schema = "run"
    remedy = "give a file that memo train wrote"

    started_at: Time
    versions: dict[str, str]
    device: str
    parameters: int
    layout: dict[str, int]
    peak_flops: float
    config: dict[str, dict[str, Any]]
    memory_forecast: dict[str, int]
    swap: SwapForecast | None
    memory_plan: dict[str, Any] | None
    attention: dict[str, str] | None = None
    host: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class RunLog:
    """The log of a run: its steps in order, each iteration once.

    Attributes:
        path: file of the log.
        header: description of the run; None if its file is missing.
        repeated: number of ignored lines, because the run resumed at an earlier iteration.
        evaluations: (iteration, validation loss in nats per token) of each evaluation of the first set in the log.
    """

    path: Path
    header: RunHeader | None
    steps: tuple[StepRecord, ...]
    repeated: int = 0
    evaluations: tuple[tuple[int, float], ...] = ()

    @classmethod
    def load(cls, run: str | Path) -> "RunLog":
        """Read a log, or the log in the directory of a run.

        Raises ArtifactError if there is none, and for a line that is not a record.
        """
        path = _log_in(Path(run))
        steps: list[StepRecord] = []
        evaluations: list[tuple[int, float]] = []
        evaluated: str | None = None
        num_records = 0
        source = Source(str(path), ArtifactError, "give the --save directory of a run, or the file of its --log-jsonl")
        with opened(path, source) as file:
            for number, line in enumerate(read_lines(file, source, max_bytes=_LONGEST_LINE_BYTES), 1):
                found = _record(line, f"{path}, line {number}")
                if isinstance(found, StepRecord):
                    num_records += 1
                    steps = _before(found.iteration, steps, lambda step: step.iteration)
                    evaluations = _before(found.iteration, evaluations, lambda evaluation: evaluation[0])
                    steps.append(found)
                elif found is not None:
                    iteration, loss, name = found
                    evaluated = name if evaluated is None else evaluated
                    if name == evaluated:
                        evaluations = _before(iteration, evaluations, lambda evaluation: evaluation[0])
                        evaluations.append((iteration, loss))
        if not steps:
            raise ArtifactError(f"{path} has no iteration yet: wait for the run's first step")
        header = header_path(path)
        head = RunHeader.load(header) if header.exists() else None
        return cls(path, head, tuple(steps), num_records - len(steps), tuple(evaluations))


def check_log(path: str) -> None:
    """Raises ArtifactError for a file whose first line is not of a log: a run would append to it."""
    with opened(path, Source(f"--log-jsonl {path}", ArtifactError, "give another path")) as file:
        if line := file.readline(_LONGEST_LINE_BYTES):
            _record(line, f"--log-jsonl {path}, line 1")


T = TypeVar("T")


def _before(iteration: int, lines: list[T], iteration_of: Callable[[T], int]) -> list[T]:
    """Remove the lines of `iteration` and later iterations, which a resumed run repeats."""
    while lines and iteration_of(lines[-1]) >= iteration:
        lines.pop()
    return lines


def default_log(save: str | None, log_jsonl: str | None) -> str | None:
    """The file of a run's log: --log-jsonl, else log.jsonl in --save, else None."""
    return log_jsonl or (None if save is None else str(Path(save) / "log.jsonl"))


def header_path(log: str | Path) -> Path:
    """`runs/a/log.jsonl` -> `runs/a/log.run.json`."""
    return Path(log).with_suffix(".run.json")


def _log_in(run: Path) -> Path:
    if not run.is_dir():
        return run
    found = run / "log.jsonl"
    if not found.exists():
        raise ArtifactError(f"{run} holds no log.jsonl: give the file that the run's --log-jsonl named")
    return found


def _record(line: bytes, where: str) -> StepRecord | tuple[int, float, str] | None:
    """An iteration, or an evaluation's (iteration, loss, name of its set); None for half a line at the end."""
    source = Source(where, ArtifactError, "give a file that --log-jsonl wrote")
    try:
        found = parse_json(line, source)
    except ArtifactError:
        if line.startswith(b"{") and not line.endswith(b"\n"):
            return None
        raise
    if isinstance(found, dict) and "evaluation" in found:
        evaluation = checked(dict[str, Any], found["evaluation"], "evaluation", source)
        loss = checked(AnyFloat, evaluation.get("loss"), "evaluation.loss", source)
        name = checked(str, evaluation.get("data", ""), "evaluation.data", source)
        return checked(Count, found.get("iteration"), "iteration", source), loss, name
    return build(StepRecord, found, source, ignore_unknown=True)
