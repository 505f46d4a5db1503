"""One page about one or several training runs: pictures and tables, in one file of HTML."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memo.artifacts.regular_file import replace_file
from memo.artifacts.run_log import RunHeader, RunLog
from memo.errors import ArtifactError, writing
from memo.report import html
from memo.report.run_drawing import (
    DRAWINGS,
    Picture,
    copy_rows,
    draw_loss,
    draw_speed,
    median,
    memory_rows,
)
from memo.units import format_bytes, format_count, format_duration_s

_UNKNOWN = "-"


def write_report(runs: Mapping[str, RunLog], directory: str | Path) -> list[Path]:
    """Write index.html and every picture as a PNG file; returns the paths, that of the page first.

    `runs` have names for people. For a picture whose data the log lacks, the page says which flag records them. Raises
    ConfigError if matplotlib is missing, ArtifactError if a file cannot be written.
    """
    pictures = draw_runs(runs)
    folder = Path(directory)
    written = [folder / "index.html", *(folder / f"{p.name}.png" for p in pictures if p.png is not None)]
    with writing(folder, ArtifactError):
        replace_file(written[0], run_page(runs, pictures))
        for picture in pictures:
            if picture.png is not None:
                replace_file(folder / f"{picture.name}.png", picture.png)
    return written


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
    drawn = [html.section(p.title, html.picture(p.png, p.title, p.caption)) for p in pictures if p.png is not None]
    missing = [f"{p.title}. {p.caption}" for p in pictures if p.png is None]
    parts = [html.section("At a glance", _glance(runs)), *drawn]
    if missing:
        parts.append(html.section("Not drawn", html.bullets(missing)))
    for name, run in runs.items():
        parts.append(html.section(f"Run {name}", *_about(run)))
    title = f"Training run {next(iter(runs))}" if len(runs) == 1 else f"{len(runs)} training runs"
    return html.page(title, "Figures of memory and copies are of rank 0. GiB is 2^30 bytes.", parts)


def _glance(runs: Mapping[str, RunLog]) -> str:
    figures = [_figures(run) for run in runs.values()]
    rows = [[label, *(each[label] for each in figures)] for label in figures[0]]
    return html.table(["", *runs], [row for row in rows if set(row[1:]) != {_UNKNOWN}])


def _about(run: RunLog) -> list[str]:
    parts = [html.note(f"Read from {run.path}.")]
    if run.repeated:
        parts.append(
            html.note(f"{run.repeated} lines were of iterations that ran again after resuming: the last counts.")
        )
    memory = [[part, format_bytes(foreseen), format_bytes(found)] for part, foreseen, found in memory_rows(run)]
    header = run.header
    if header is None:
        return [*parts, html.note("There is no log.run.json beside the log, so configuration and plan are not known.")]
    parts.append(html.table(["What ran", ""], _identity(header), numbers=False))
    parts.append(html.table(["Memory of rank 0", "foreseen", "at the last iteration"], memory))
    return [*parts, *_plan(run, header), *_configuration(header)]


def _identity(header: RunHeader) -> list[list[str]]:
    layout = header.layout
    grid = " x ".join(f"{axis} {layout.get(axis, 1)}" for axis in ("tp", "cp", "pp", "dp"))
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    return [
        ["last started", header.started_at],
        ["command", header.command or _UNKNOWN],
        ["host", header.host or _UNKNOWN],
        ["device", header.device],
        ["peak of one device", f"{header.peak_flops / 1e12:.4g} TFLOP/s"],
        ["parameters", format_count(header.parameters)],
        ["layout", f"{grid}, {layout.get('microbatches', _UNKNOWN)} microbatches"],
        ["versions", versions],
    ]


def _plan(run: RunLog, header: RunHeader) -> list[str]:
    parts = []
    if header.swap is None:
        parts.append(html.note("No swap plan: --offload-alpha is off, or recomputation takes its place."))
    elif not header.swap.moves:
        parts.append(html.note("Swap plan: all activations fit in device memory, so nothing moves."))
    else:
        swap = header.swap
        moved = ", ".join(f"{name} {share:.0%}" for name, share in swap.shares.items())
        text = f"Swap plan ({swap.origin}). Of the tokens move: {moved}. What keeps more from moving: {swap.limit}."
        rows = [[what, _shown(planned), _shown(found)] for what, planned, found in copy_rows(run)]
        measured = median(run.steps, "hidden_share")
        rows.append(["copies hidden", f"{swap.hidden_share:.0%}", _shown(measured, "{:.0%}")])
        parts += [html.note(text), html.table(["Seconds of a step", "planned", "measured, median"], rows)]
    if header.memory_plan is not None:
        plan, last = header.memory_plan, run.steps[-1]
        used = _UNKNOWN if last.planned_peak_bytes is None else format_bytes(last.planned_peak_bytes)
        rows = [
            ["reserved for planned addresses", format_bytes(plan.get("arena_bytes", 0)), used],
            ["least that any plan takes", format_bytes(plan.get("lower_bound_bytes", 0)), _UNKNOWN],
            ["requests not as planned", "0", _UNKNOWN if last.fallbacks is None else str(last.fallbacks)],
        ]
        head = [f"Memory plan ({plan.get('planner')}, {plan.get('proof')})", "planned", "used at most"]
        parts.append(html.table(head, rows))
    return parts


def _configuration(header: RunHeader) -> list[str]:
    """Every field that has a value, section by section."""
    return [
        html.folded(
            f"Configuration: {section}",
            html.table(["field", "value"], [[n, str(v)] for n, v in fields.items() if v is not None], numbers=False),
        )
        for section, fields in header.config.items()
    ]


def _shown(value: float | None, form: str = "{:.4g}") -> str:
    return _UNKNOWN if value is None else form.format(value)


def _figures(run: RunLog) -> dict[str, str]:
    """What a run comes to, in a few words each."""
    steps, last = run.steps, run.steps[-1]
    best = min(steps, key=lambda step: (math.isnan(step.lm_loss), step.lm_loss))  # NaN comes last
    # Of a model that is fine-tuned the evaluations before and after.
    evaluated = dict([run.evaluations[0], run.evaluations[-1]]) if run.evaluations else {}
    mfu = [step.mfu_percent for step in steps if step.mfu_percent is not None]
    return {
        "iterations": f"{steps[0].iteration} to {last.iteration}",
        "samples seen": f"{last.consumed_samples:,.0f}",
        "last loss": f"{last.lm_loss:.4f}",
        "lowest loss": f"{best.lm_loss:.4f} (iteration {best.iteration})",
        "validation loss": " to ".join(f"{loss:.4f} (iteration {at})" for at, loss in evaluated.items()) or _UNKNOWN,
        "step, median": _shown(median(steps, "step_time_s"), "{:.4g} s"),
        "TGS, median": _shown(median(steps, "tgs"), "{:,.1f}"),
        "TGS, best": f"{max(step.tgs for step in steps):,.1f}",
        "MFU, median": _shown(median(steps, "mfu_percent"), "{:.2f} %"),
        "MFU, best": _shown(max(mfu, default=None), "{:.2f} %"),
        "time in steps": format_duration_s(sum(step.step_time_s for step in steps)),
        "device memory, peak": format_bytes(last.device_peak_bytes),
        "host memory, peak": format_bytes(last.host_peak_bytes),
        "skipped, NaN": f"{last.skipped_iterations}, {last.nan_iterations}",
    }
