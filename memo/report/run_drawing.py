"""Pictures of training runs from their logs: loss, speed, memory, copies beside compute, plan against measured."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from memo.artifacts.run_log import RunLog, StepRecord
from memo.report.drawing import byte_unit, colour_of, encoded, panels

COMPONENTS = {
    "weights": "weights_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_bytes",
    "rounding_buffers": "rounding_buffers_bytes",
    "transient": "transient_peak_bytes",
}
"""Components of device memory from the bottom: {name in a header's memory_forecast: field of StepRecord}."""

HOST = ("host_records", "host_records_bytes")

_SMOOTHED_FROM = 100
"""Curves of at least this many steps are smoothed."""


@dataclass(frozen=True)
class Picture:
    """A picture as PNG; if `png` is None, `caption` says why."""

    name: str
    title: str
    caption: str
    png: bytes | None


def draw_loss(runs: Mapping[str, RunLog]) -> Picture:
    """Loss, validation loss as dots, the gradient's norm before clipping, and the learning rate, over iterations."""
    curves = [
        ("lm loss, nats a token", "lm_loss", "linear"),
        ("gradient norm", "grad_norm", "log"),
        ("learning rate", "lr", "linear"),
    ]
    caption = (
        "Loss of the global batch, the gradient's norm before clipping, and the learning rate. From "
        f"{_SMOOTHED_FROM} iterations on, thick lines are smoothed, with the values themselves behind them."
    )
    return Picture("loss", "Loss", caption, _draw(runs, curves))


def draw_speed(runs: Mapping[str, RunLog]) -> Picture:
    """TGS over iterations, and MFU if it is known."""
    curves, caption = [("tokens per GPU and second", "tgs", "linear")], "Tokens per GPU and second. Warm-up is in it."
    if any(median(run.steps, "mfu_percent") is not None for run in runs.values()):
        curves.insert(0, ("MFU, % of peak", "mfu_percent", "linear"))
        caption = "Model FLOPs utilisation (without recomputation), and tokens per GPU and second. Warm-up is in it."
    return Picture("speed", "Speed", caption, _draw(runs, curves))


def draw_memory(run: RunLog) -> Picture:
    """Stacked components of one rank's memory over iterations; lines for host memory and the foreseen total."""
    steps = [step for step in run.steps if step.weights_bytes is not None]
    title = "Memory by component"
    if not steps:
        why = "The log has no memory by component: it was written by an older memo, train again to record it."
        return Picture("memory", title, why, None)
    at: list[float] = [step.iteration for step in steps]
    if len(at) == 1:  # the area of a single iteration would be invisible
        at, steps = [at[0] - 0.5, at[0] + 0.5], steps * 2
    columns = {part: [getattr(step, field) or 0 for step in steps] for part, field in COMPONENTS.items()}
    columns = {part: values for part, values in columns.items() if any(values)}
    host = [step.host_records_bytes or 0 for step in steps]
    foreseen = None if run.header is None else sum(run.header.memory_forecast.get(part, 0) for part in COMPONENTS)
    unit, unit_name = byte_unit(max([*map(sum, zip(*columns.values(), strict=True)), *host]))
    figure, (axes,) = panels("the memory of a run", 8.0, 3.6)
    _axes(axes, "iteration", f"{unit_name} of rank 0")
    stacked = [[value / unit for value in values] for values in columns.values()]
    labels = [part.replace("_", " ") for part in columns]
    colours = [colour_of(index) for index, part in enumerate(COMPONENTS) if part in columns]
    axes.stackplot(at, stacked, labels=labels, colors=colours)
    if any(host):
        axes.plot(at, [value / unit for value in host], color="0.25", label="host records")
    if foreseen is not None:
        axes.axhline(foreseen / unit, color="black", linewidth=0.9, linestyle="--", label="foreseen on the device")
    axes.set_ylim(bottom=0)
    _legend(axes)
    caption = (
        "What lies in memory on rank 0; transient is the most that a step took beside the rest so far (activations "
        "that stay, working sets, the loss). Host records are the activations that were moved."
    )
    if is_on_cpu(run):
        caption += (
            " On a CPU transient is what the whole process has beside the rest, with libraries and caches in it, so it "
            "may exceed what is foreseen."
        )
    return Picture("memory", title, caption, encoded(figure))


def draw_copies(run: RunLog) -> Picture:
    """Seconds of layers, waits and copies in each timed step, and the share of the copies that was hidden."""
    title = "Copies beside compute"
    steps = [step for step in run.steps if step.hidden_share is not None]
    if not steps:
        return Picture("copies", title, _why_no_copies(run), None)
    figure, (above, below) = panels("the copies of a run", 8.0, 4.4, heights=(1, 1))
    at = [step.iteration for step in steps]
    _axes(above, "", "seconds of a step")
    for index, (label, field) in enumerate(_COPY_SECONDS.items()):
        values = [getattr(step, field) for step in steps]
        above.plot(at, values, label=label, color=f"C{index}", marker="." if len(at) < 2 * _SMOOTHED_FROM else "")
    above.set_ylim(bottom=0)
    _legend(above)
    _axes(below, "iteration", "copies hidden, %")
    below.plot(at, [100.0 * (step.hidden_share or 0.0) for step in steps], color="C0", marker=".", label="measured")
    if run.header is not None and run.header.swap is not None:
        share = 100.0 * run.header.swap.hidden_share
        below.axhline(share, color="black", linewidth=0.9, linestyle="--", label="planned")
    below.set_ylim(-3, 103)
    _legend(below)
    interval = min((later - sooner for sooner, later in pairwise(at)), default=1)
    caption = (
        f"Timed every {interval} iterations (--log-interval), on rank 0. Hidden is what of the copies' time "
        "passed while a layer computed; where copies take turns with compute, as they do by default on CPUs, it is 0."
    )
    return Picture("copies", title, caption, encoded(figure))


def draw_plan(run: RunLog) -> Picture:
    """Bars of foreseen and measured bytes, and for a run with a swap plan of foreseen and measured seconds."""
    title = "Plan against measured"
    if run.header is None:
        why = "There is no file that says what was planned (log.run.json beside the log): train again to record it."
        return Picture("plan", title, why, None)
    bytes_rows = [row for row in memory_rows(run) if row[1] or row[2]]
    seconds_rows = [row for row in copy_rows(run) if row[1] is not None and row[2] is not None]
    if not bytes_rows:
        return Picture("plan", title, "The log has no memory by component: train again to record it.", None)
    heights = [len(bytes_rows) + 1, *([len(seconds_rows) + 1] if seconds_rows else [])]
    figure, subplots = panels("the plan of a run", 8.0, 0.9 + 0.36 * sum(heights), heights, sharex=False)
    unit, unit_name = byte_unit(max(max(row[1], row[2]) for row in bytes_rows))
    _pairs(subplots[0], [(label, planned / unit, found / unit) for label, planned, found in bytes_rows], unit_name)
    if seconds_rows:
        _pairs(subplots[1], [(label, p or 0.0, m or 0.0) for label, p, m in seconds_rows], "seconds of a step")
    caption = "Foreseen before the first step, and measured: memory at the last iteration, times as medians. Of rank 0."
    if is_on_cpu(run):
        caption += (
            " Left out is the transient part: on a CPU only the whole process can be measured, with libraries and "
            "caches in it that no plan has."
        )
    return Picture("plan", title, caption, encoded(figure))


def is_on_cpu(run: RunLog) -> bool:
    return run.header is not None and run.header.config.get("hardware", {}).get("device") == "cpu"


def memory_rows(run: RunLog) -> list[tuple[str, int, int]]:
    """(component, bytes foreseen, bytes at the last iteration) of every component that was measured separately."""
    foreseen = run.header.memory_forecast if run.header is not None else {}
    last, rows = run.steps[-1], []
    for part, field in (*COMPONENTS.items(), HOST):
        value = getattr(last, field)
        if value is not None and not (part == "transient" and is_on_cpu(run)):
            rows.append((part.replace("_", " "), foreseen.get(part, 0), value))
    return rows


def copy_rows(run: RunLog) -> list[tuple[str, float | None, float | None]]:
    """(name, planned seconds of a step, measured median) of a run with a swap plan; None if unknown."""
    swap = run.header.swap if run.header is not None else None
    if swap is None or not swap.moves:
        return []
    rows: list[tuple[str, float | None, float | None]] = []
    for label, field in _COPY_SECONDS.items():
        planned = getattr(swap, field)
        rows.append((label, planned if planned < float("inf") else None, median(run.steps, field)))
    return rows


def median(steps: Sequence[StepRecord], field: str) -> float | None:
    """Median of a field over the iterations that have it; None if none has."""
    values = [value for step in steps if (value := getattr(step, field)) is not None]
    return statistics.median(values) if values else None


_COPY_SECONDS = {"layers compute": "layers_s", "copies": "copies_s", "compute waits for copies": "copy_wait_s"}


def _why_no_copies(run: RunLog) -> str:
    swap = run.header.swap if run.header is not None else None
    if run.header is not None and swap is None:
        return "Nothing is swapped in this run, so there are no copies: --offload-alpha auto or a number turns it on."
    if swap is not None and not swap.moves:
        return "All activations fit in device memory, so nothing moves: a number in --offload-alpha forces it."
    return "No step was timed: copies are timed every --log-interval iterations of a run that swaps (--offload-alpha)."


def _draw(runs: Mapping[str, RunLog], curves: Sequence[tuple[str, str, str]]) -> bytes:
    """Draw panels one below another, with a line for each run."""
    heights = [3, *[2] * (len(curves) - 1)]
    figure, subplots = panels("a run", 8.0, 1.8 + 1.5 * len(curves), heights)
    for axes, (label, field, scale) in zip(subplots, curves, strict=True):
        _axes(axes, "iteration" if axes is subplots[-1] else "", label)
        for index, (name, run) in enumerate(runs.items()):
            known = [s for s in run.steps if getattr(s, field) is not None]
            at, values = [s.iteration for s in known], [float(getattr(s, field)) for s in known]
            smooth = smoothed(values) if len(values) >= _SMOOTHED_FROM else None
            marker = "." if len(values) == 1 else ""
            thin = {"linewidth": 0.6, "alpha": 0.4} if smooth else {"linewidth": 1.4, "label": name}
            axes.plot(at, values, color=f"C{index}", marker=marker, **thin)
            if smooth:
                axes.plot(at, smooth, color=f"C{index}", linewidth=1.6, label=name)
            if field == "lm_loss" and run.evaluations:
                label = "validation" if len(runs) == 1 else f"{name}, validation"
                axes.plot(*zip(*run.evaluations, strict=True), "o", color=f"C{index}", markersize=4, label=label)
        if scale == "log" and any(getattr(s, field) > 0 for run in runs.values() for s in run.steps):
            from matplotlib.ticker import LogFormatter  # writes 20 instead of 2 x 10^1

            axes.set_yscale("log")
            for put in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                put(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.4)))  # fewer if there are many decades
            axes.tick_params(which="minor", labelsize=6)
    if len(runs) > 1 or any(run.evaluations for run in runs.values()):
        _legend(subplots[0])
    return encoded(figure)


def smoothed(values: Sequence[float]) -> list[float]:
    """Medians over a fiftieth of the curve around each point, which removes single outliers."""
    reach = max(1, len(values) // 100)
    return [statistics.median(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def _pairs(axes: Any, rows: Sequence[tuple[str, float, float]], unit_name: str) -> None:
    at = range(len(rows))
    for column, shift, label, colour in ((1, -0.2, "foreseen", "0.75"), (2, 0.2, "measured", colour_of(0))):
        bars = axes.barh([y + shift for y in at], [row[column] for row in rows], 0.38, label=label, color=colour)
        axes.bar_label(bars, fmt=" {:.3g}", fontsize=6.5)
    axes.set_yticks(list(at), [row[0] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    _axes(axes, unit_name, "")
    _legend(axes)


def _axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y" if y else "x", linewidth=0.3)
    axes.set_axisbelow(True)
    if x == "iteration":
        axes.xaxis.get_major_locator().set_params(integer=True)


def _legend(axes: Any) -> None:
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


DRAWINGS: tuple[Callable[[RunLog], Picture], ...] = (draw_memory, draw_copies, draw_plan)
"""Drawings that each run has for itself; all runs share the drawings of loss and speed."""
