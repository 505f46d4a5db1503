"""The whole simulated step as spans: every layer, copy, reduction and update of every stage.

Nothing is shortened here: all microbatches run, layer by layer, on the streams of their stage. So tests compare the
fast prediction with this simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memo.artifacts import chrome_trace
from memo.config import RunConfig
from memo.config.derived import num_microbatches
from memo.errors import ConfigError
from memo.estimate.hardware import Hardware
from memo.simulate.model import StepModel, step_model
from memo.simulate.resources import ROWS
from memo.simulate.stage import run_stages, update_stages

MOST_PASSES = 1 << 19
"""Most forwards and backwards of layers in one file, which then has some 100 MB: viewers open little more."""


@dataclass(frozen=True)
class Span:
    """One piece of work on one row of one stage; every rank of the stage does this work."""

    stage: int
    row: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """All spans of a step, and its times.

    Attributes:
        pipeline_s: seconds from the start of the first forward to the end of the last backward.
        stall_s: seconds, by stage, for which compute waits for copies.
    """

    spans: tuple[Span, ...]
    step_time_s: float
    pipeline_s: float
    stall_s: tuple[float, ...]


def trace_step(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    path: str | Path,
    alpha: float | Mapping[str, int] | None = None,
) -> None:
    """Simulate one step and write its spans; other arguments and errors are those of
    `memo.simulate.predict.predict_step`.

    Raises ConfigError for a step of more than `MOST_PASSES`, ArtifactError for a file that cannot be written.
    """
    passes = 2 * config.model.num_layers * num_microbatches(config, world_size)
    if passes > MOST_PASSES:
        raise ConfigError(
            f"--trace-out {path}: the step is {passes:,} forwards and backwards of layers, a trace holds "
            f"{MOST_PASSES:,}: use a smaller --global-batch-size"
        )
    write_trace(simulate_step(config, world_size, hardware, alpha).spans, path)


def simulate_step(
    config: RunConfig, world_size: int, hardware: Hardware, alpha: float | Mapping[str, int] | None = None
) -> SimulatedStep:
    """Simulate one step event by event; arguments and errors are those of `memo.simulate.predict.predict_step`."""
    return simulate(step_model(config, world_size, hardware, alpha))


def simulate(model: StepModel) -> SimulatedStep:
    """Simulate one step of given costs."""
    spans: list[Span] = []

    def record(stage: int, row: str, name: str, start_s: float, end_s: float) -> None:
        spans.append(Span(stage, row, name, start_s, end_s))

    stages, clock = run_stages(model, model.pipeline, record)
    _, step_s = update_stages(stages, clock)
    return SimulatedStep(tuple(spans), step_s, clock.makespan_s, tuple(stage.streams.stall_s for stage in stages))


def write_trace(spans: Sequence[Span], path: str | Path) -> None:
    """Write spans in Chrome's trace format, which https://ui.perfetto.dev opens: a process a stage, a thread a row.

    Raises ArtifactError when the file cannot be written.
    """
    events: list[chrome_trace.Event] = []
    seldom = {"cpu", "disk"}  # shown only if used: most updates run on GPUs, and most activations stay in host memory
    rows = [row for row in ROWS if row not in seldom or any(span.row == row for span in spans)]
    for stage in sorted({span.stage for span in spans}):
        events += chrome_trace.process(stage, f"stage {stage}", rows)
    for span in spans:
        row, during = rows.index(span.row), (span.start_s, span.end_s)
        events.append(chrome_trace.complete(span.stage, row, span.name, during, span.row, {}))
    chrome_trace.write(events, path)
