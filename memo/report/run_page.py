"""One page about one or several training runs: pictures and tables, in one file of HTML (templates/run.html)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memo.artifacts.regular_file import replace_file
from memo.artifacts.run_log import RunLog
from memo.errors import ArtifactError, writing
from memo.report.page import UNKNOWN, rendered, shown
from memo.report.run_drawing import DRAWINGS, Picture, copy_rows, draw_loss, draw_speed, median, memory_rows
from memo.units import format_bytes, format_duration_s


def write_report(runs: Mapping[str, RunLog], directory: str | Path) -> list[Path]:
    """Write index.html and every picture as a PNG file; returns the paths, the page first.

    `runs`: {name for people: log}. If a log lacks the data of a picture, the page names the flag that records them.
    Raises ConfigError if matplotlib is missing, ArtifactError if a file cannot be written.
    """
    pictures, folder = draw_runs(runs), Path(directory)
    files: dict[Path, str | bytes] = {folder / "index.html": run_page(runs, pictures)}
    files |= {folder / f"{picture.name}.png": picture.png for picture in pictures if picture.png is not None}
    with writing(folder, ArtifactError):
        for path, content in files.items():
            replace_file(path, content)
    return list(files)


def draw_runs(runs: Mapping[str, RunLog]) -> list[Picture]:
    """Loss and speed of all runs together, and the other pictures of each run, numbered if there are several."""
    pictures = [draw_loss(runs), draw_speed(runs)]
    for number, (name, run) in enumerate(runs.items(), 1):
        for drawn in (draw(run) for draw in DRAWINGS):
            own = replace(drawn, name=f"{drawn.name}{number}", title=f"{drawn.title}: {name}")
            pictures.append(own if len(runs) > 1 else drawn)
    return pictures


def run_page(runs: Mapping[str, RunLog], pictures: Sequence[Picture]) -> str:
    """The page, as text."""
    figures = [_figures(run) for run in runs.values()]
    rows = [[label, *(each[label] for each in figures)] for label in figures[0]]
    return rendered(
        "run.html",
        title=f"Training run {next(iter(runs))}" if len(runs) == 1 else f"{len(runs)} training runs",
        runs=runs,
        pictures=pictures,
        glance=[row for row in rows if set(row[1:]) != {UNKNOWN}],
        memory_rows=memory_rows,
        copy_rows=copy_rows,
        median=median,
    )


def _figures(run: RunLog) -> dict[str, str]:
    """{name: value} of the main figures of a run, for people."""
    steps, last = run.steps, run.steps[-1]
    best = min(steps, key=lambda step: (math.isnan(step.lm_loss), step.lm_loss))  # NaN comes last
    # The first and last evaluation: for fine-tuning these are before and after.
    evaluated = dict([run.evaluations[0], run.evaluations[-1]]) if run.evaluations else {}
    mfu = [step.mfu_percent for step in steps if step.mfu_percent is not None]
    return {
        "iterations": f"{steps[0].iteration} to {last.iteration}",
        "samples seen": f"{last.consumed_samples:,.0f}",
        "last loss": f"{last.lm_loss:.4f}",
        "lowest loss": f"{best.lm_loss:.4f} (iteration {best.iteration})",
        "validation loss": " to ".join(f"{loss:.4f} (iteration {at})" for at, loss in evaluated.items()) or UNKNOWN,
        "step, median": shown(median(steps, "step_time_s"), "{:.4g} s"),
        "TGS, median": shown(median(steps, "tgs"), "{:,.1f}"),
        "TGS, best": f"{max(step.tgs for step in steps):,.1f}",
        "MFU, median": shown(median(steps, "mfu_percent"), "{:.2f} %"),
        "MFU, best": shown(max(mfu, default=None), "{:.2f} %"),
        "time in steps": format_duration_s(sum(step.step_time_s for step in steps)),
        "device memory, peak": format_bytes(last.device_peak_bytes),
        "host memory, peak": format_bytes(last.host_peak_bytes),
        "skipped, NaN": f"{last.skipped_iterations}, {last.nan_iterations}",
    }
