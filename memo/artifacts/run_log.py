"""The log of a training run: a line of JSON for each iteration, and a file that describes the run.

    log.jsonl       {"iteration": 1, "consumed_samples": 8, "lm_loss": 10.8, ...}     one StepRecord a line, appended
                    {"iteration": 100, "evaluation": {"loss": 2.1, ...}}              after each evaluation
    log.run.json    {"schema": "run", "version": 1, "config": {...}, ...}             one RunHeader, the latest start

A resumed run appends, and begins behind its checkpoint: what the lines before it say of that iteration and later ones
no longer counts. A run that was killed may leave half a line at the end, which is passed over.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memo.artifacts import files
from memo.artifacts.fields import AnyFloat, Count, Time, build, checked
from memo.artifacts.reading import Source, parse_json, read_lines
from memo.errors import ArtifactError

SCHEMA, VERSION = "run", 1
_LONGEST_LINE_BYTES = 1 << 20
"""Of a log; an iteration takes a kilobyte."""


@dataclass(frozen=True)
class StepRecord:
    """One training iteration. What is of one rank is rank 0's in a log; None: not measured in this iteration.

    mfu_percent and tflops_per_gpu count model FLOPs alone (6 s P + 6 n h s^2 a sample, causal half of
    attention; MEMO's convention), without what is recomputed. tgs is tokens per GPU per second.

    Attributes:
        step_time_s: from one step's begin to its end on the host. On CUDA the update of the weights may then still run;
            the next step waits for it.
        device_peak_bytes, host_peak_bytes: of this process so far; on a CPU both are the peak of its resident set.
        weights_bytes, gradients_bytes, optimizer_bytes: of this rank's shards, as they lie in memory.
        rounding_buffers_bytes: slots and workspace of swapping, slots of streamed states; 0 without.
        host_records_bytes: activations and states in host memory; 0 without swapping and --offload-states.
        transient_peak_bytes: the most that a step took beside all these so far: activations that stay, working sets,
            the loss, buffers of communication. On a CPU it is what the resident set's peak leaves when the components
            and the bare process (352 MiB or more) are taken off: rough, and too small for tiny models.
        layers_s: in a step, the compute stream's time inside of layers that run under a swap plan.
        copy_wait_s: that the compute stream stood still for their copies.
        copies_s: that the copies of both directions took, together.
        hidden_share: of copies_s, what passed while a layer computed, 0 to 1.
        state_copies_s: that copies of streamed states took in a step, both directions together (--offload-states).
            Those of the optimizer's step that the device had not come to yet count in the next record with this field.
        state_wait_s: that the compute stream, or the CPU after the last backward, stood still for them.
        host_update_s: that the CPU took to update what lies in host memory.
        planned_peak_bytes: most bytes in use at planned addresses (--memory-planner).
        fallbacks: requests so far that were not as planned, and went to torch's allocator.
    """

    iteration: Count
    consumed_samples: Count
    lm_loss: AnyFloat
    grad_norm: AnyFloat
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


@dataclass(frozen=True)
class SwapForecast:
    """What the swap plan of rank 0 expects; times are seconds of one layer and microbatch where nothing else is said.

    Attributes:
        moves: False: everything fits on the device, so nothing moves.
        shares: by group of tensors, of the tokens that move (memo.spec.skeleton).
        copies_s: of a step: all copies of both directions, run alone.
        layers_s: of a step: forwards, backwards and recomputation of all layers.
        copy_wait_s: of a step.
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
class RunHeader:
    """What ran: written when training starts, again when it is resumed.

    Attributes:
        started_at: local time with its distance from UTC, ISO 8601.
        versions: of memo, torch and python.
        config: the resolved configuration by section, as in config.toml.
        layout: tp, cp, pp, dp, world size, microbatches.
        peak_flops: of one device, what MFU refers to.
        memory_forecast: bytes of rank 0 by component, as estimated before training: weights, gradients, optimizer,
            rounding_buffers, transient, host_records and others. On a CPU `transient` holds the scratch memory that
            matrix products were measured to take there; estimates on paper leave it out.
        memory_plan: of --memory-planner: planner, proof, arena_bytes, lower_bound_bytes; None without.
        attention: name of the kernels, and the reason why these; None in files of older versions.
    """

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

    def save(self, path: str | Path) -> None:
        """Raises ArtifactError for a path that cannot be written."""
        files.write(path, SCHEMA, VERSION, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "RunHeader":
        """Raises ArtifactError for anything but a header."""
        source = Source(str(path), ArtifactError, "give a file that memo train wrote")
        return build(cls, files.read(path, SCHEMA, VERSION), source)


@dataclass(frozen=True)
class RunLog:
    """All that is known of a run: its steps in order, each iteration once.

    Attributes:
        path: of the log.
        header: None where the file is missing.
        repeated: lines that no longer count, because the run went on from an earlier iteration.
        evaluations: (iteration, validation loss in nats a token).
    """

    path: Path
    header: RunHeader | None
    steps: tuple[StepRecord, ...]
    repeated: int = 0
    evaluations: tuple[tuple[int, float], ...] = ()

    @classmethod
    def load(cls, run: str | Path) -> "RunLog":
        """Read a log, or the log in the directory of a run.

        Raises ArtifactError when there is none, and for a line that is no record.
        """
        path = _log_in(Path(run))
        lines = _lines(path)
        steps: list[StepRecord] = []
        evaluations: list[tuple[int, float]] = []
        num_records = 0
        for number, line in enumerate(lines, 1):
            found = _record(line, f"{path}, line {number}", is_last=number == len(lines))
            if isinstance(found, StepRecord):
                num_records += 1
                steps = _before(found.iteration, steps, lambda step: step.iteration)
                evaluations = _before(found.iteration, evaluations, lambda evaluation: evaluation[0])
                steps.append(found)
            elif found is not None:
                evaluations.append(found)
        if not steps:
            raise ArtifactError(f"{path} has no iteration yet: wait for the run's first step")
        header = header_path(path)
        head = RunHeader.load(header) if header.exists() else None
        return cls(path, head, tuple(steps), num_records - len(steps), tuple(evaluations))


T = TypeVar("T")


def _before(iteration: int, lines: list[T], iteration_of: Callable[[T], int]) -> list[T]:
    """What still counts when the run goes on with this iteration."""
    while lines and iteration_of(lines[-1]) >= iteration:
        lines.pop()
    return lines


def default_log(save: str | None, log_jsonl: str | None) -> str | None:
    """Where a run writes its log: what --log-jsonl says, else log.jsonl in --save, else nowhere."""
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


def _lines(path: Path) -> list[bytes]:
    remedy = "give the --save directory of a run, or the file of its --log-jsonl"
    return list(read_lines(path, Source(str(path), ArtifactError, remedy), max_bytes=_LONGEST_LINE_BYTES))


def _record(line: bytes, where: str, is_last: bool) -> StepRecord | tuple[int, float] | None:
    """An iteration, or an evaluation's (iteration, loss); None for half a line at the end."""
    source = Source(where, ArtifactError, "give a file that --log-jsonl wrote")
    try:
        found = parse_json(line, source)
    except ArtifactError:
        if is_last and line.startswith(b"{"):
            return None
        raise
    if isinstance(found, dict) and "evaluation" in found:
        evaluation = checked(dict[str, Any], found["evaluation"], "evaluation", source)
        loss = checked(AnyFloat, evaluation.get("loss"), "evaluation.loss", source)
        return checked(Count, found.get("iteration"), "iteration", source), loss
    return build(StepRecord, found, source, ignore_unknown=True)
