"""Draws the times of a swap plan's steps, recorded or simulated, as text or as a picture (MEMO, Fig. 11)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from memo.report.drawing import check_suffix, colour_of, panels, save_figure
from memo.report.timeline import Kind, SwapSpan, copied_s, hidden_share, rows_of, stalled_s, tenancies

_WAIT_COLOUR = "0.85"
_BLOCK_HEIGHT = 0.8
_THIN_INCHES = 0.03
_ROW_NAMES = {"write": "disk write", "read": "disk read"}
_COMPUTE_COLOURS = {"F": "#bcdcf2", "B": "#8dbbe0"}
_KIND_COLOURS: dict[Kind, str] = {
    "activations": "#66c2a5",
    "keys and values": "#fc8d62",
    "layer inputs": "#e6c229",
    "hidden states": "#c99bd6",
}
_KIND_NAMES: dict[Kind, str] = {
    "activations": "activations of a section",
    "keys and values": "keys and values",
    "layer inputs": "inputs of layers that recompute attention",
    "hidden states": "hidden states between layers",
}
_CHARACTER_INCHES = 0.075  # of a label in 7 points


def draw_text(spans: Sequence[SwapSpan], width: int = 120) -> str:
    """Return a drawing with a line of `width` columns a stream; a block begins with `|`, and with its label if it fits.

    Dots are idle time. The last line has the figures.
    """
    first_s, total_s = extent_s(spans)
    lines = []
    for row in rows_of(spans):
        cells = ["."] * width
        for span in spans:
            if span.row == row and total_s > 0:
                first, end = (round((at_s - first_s) / total_s * width) for at_s in (span.start_s, span.end_s))
                length = end - first
                label = f"|{span.label}"
                cells[first:end] = (label if len(label) <= length else "|").ljust(length, "-")[:length]
        lines.append(f"{row:<9}" + "".join(cells))
    return "\n".join([*lines, summary(spans)])


def summary(spans: Sequence[SwapSpan]) -> str:
    """Return a line with the time of all spans, the time that compute waits, and the hidden share of the copies."""
    _, total_s = extent_s(spans)
    text = f"{total_s:.3g} s; compute waits {stalled_s(spans):.3g} s for copies"
    if copied_s(spans):
        # Rounded down, so that 100 % means all copies.
        text += f", which take {copied_s(spans):.3g} s, {int(hidden_share(spans) * 100 + 1e-6)} % of it under layers"
    return text


def draw_swaps(spans: Sequence[SwapSpan], path: str | Path, title: str = "", width_inches: float = 10.0) -> None:
    """Draw streams and slots against time (MEMO, Fig. 11), with a row for compute, offload, prefetch and every slot,
    and two more where anything is on a disk.

    Each layer has a colour, and a block has a label if it is wide enough: F3 is the forward of layer 3, or F0:3 if
    there are several microbatches. Where layers are swept, more moves than what is in slots; then colours tell what a
    copy moves, a legend names them, and F3:5 is section 5 of layer 3. Grey means that compute waits for a copy. The
    caption has the figures.

    Raises ConfigError if matplotlib is missing or the suffix is unknown, ArtifactError if the file cannot be written.
    """
    held, streams, kinds = tenancies(spans), rows_of(spans), kinds_of(spans)
    rows = [*streams, *(f"slot {slot}" for slot in sorted({tenancy.slot for tenancy in held}))]
    has_legend = any(kind != "activations" for kind in kinds)
    check_suffix(path)
    figure, (axes,) = panels(path, width_inches, 0.9 + 0.36 * len(rows) + 0.5 * has_legend)
    first_s, total_s = extent_s(spans)
    painter = _Painter(axes, first_s, seconds_per_inch=total_s / width_inches, named=_microbatches(spans) > 1)
    for span in spans:
        prefix = span.step.op.kind if span.row == "compute" else ""
        row = rows.index("compute" if span.row == "wait" else span.row)
        colour = _WAIT_COLOUR if span.row == "wait" else _legend_colour(span) if has_legend else None
        painter.block(row, (span.start_s, span.end_s), span.place, prefix, colour, names=span.row != "wait")
    for tenancy in held:
        colour = _KIND_COLOURS["activations"] if has_legend else None
        painter.block(rows.index(f"slot {tenancy.slot}"), (tenancy.start_s, tenancy.end_s), tenancy.key, colour=colour)
    axes.set_yticks(range(len(rows)), [_ROW_NAMES.get(row, row) for row in rows])
    if has_legend:
        _legend(figure, spans, kinds)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # compute on top
    axes.set_xlim(0, total_s or 1.0)
    axes.set_xlabel(f"seconds\n{summary(spans)}")
    axes.spines["left"].set_visible(False)
    axes.set_title(title, fontsize=9, loc="left")
    save_figure(figure, path)


class _Painter:
    """Blocks of one drawing."""

    def __init__(self, axes: Any, first_s: float, seconds_per_inch: float, named: bool) -> None:
        self.axes, self.first_s, self.seconds_per_inch = axes, first_s, seconds_per_inch
        self.named = named  # whether labels name the microbatch

    def block(
        self,
        row: int,
        during_s: tuple[float, float],
        key: tuple[int, ...],
        prefix: str = "",
        colour: Any = None,
        names: bool = True,
    ) -> None:
        """Draw a block. `colour`: default: that of the layer. `names`: whether the block has a label."""
        start_s, duration_s = during_s[0] - self.first_s, during_s[1] - during_s[0]
        colour = colour_of(key[1]) if colour is None else colour
        is_thin = duration_s / self.seconds_per_inch < _THIN_INCHES
        self.axes.barh(
            row,
            duration_s,
            _BLOCK_HEIGHT,
            left=start_s,
            color=colour,
            edgecolor=colour if is_thin else "white",  # a white edge would cover a thin block
            linewidth=0.8 if is_thin else 0.4,
        )
        label = prefix + ":".join(map(str, key if self.named else key[1:]))
        if names and duration_s / self.seconds_per_inch >= _CHARACTER_INCHES * len(label):
            self.axes.text(start_s + duration_s / 2, row, label, ha="center", va="center", fontsize=7)


def _legend_colour(span: SwapSpan) -> str:
    """Return the colour of compute by its direction, and of a copy by the kind of data that it moves."""
    return _COMPUTE_COLOURS[span.step.op.kind] if span.row == "compute" else _KIND_COLOURS[span.kind]


def _legend(figure: Any, spans: Sequence[SwapSpan], kinds: Sequence[Kind]) -> None:
    """Explain the colours above the drawing."""
    from matplotlib.patches import Patch

    entries = [("forward", _COMPUTE_COLOURS["F"]), ("backward", _COMPUTE_COLOURS["B"])]
    entries += [(_KIND_NAMES[kind], _KIND_COLOURS[kind]) for kind in kinds]
    entries += [("compute waits", _WAIT_COLOUR)] if any(span.row == "wait" for span in spans) else []
    patches = [Patch(facecolor=colour, label=name) for name, colour in entries]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, fontsize=7, frameon=False)


def kinds_of(spans: Sequence[SwapSpan]) -> list[Kind]:
    """Return the kinds of data that are copied, in the order of `Kind`."""
    return [kind for kind in get_args(Kind) if any(span.kind == kind and span.row != "compute" for span in spans)]


def extent_s(spans: Sequence[SwapSpan]) -> tuple[float, float]:
    """Return when the first span starts, and the seconds from then to the last end; 0 without spans."""
    first_s = min((span.start_s for span in spans), default=0.0)
    return first_s, max((span.end_s for span in spans), default=0.0) - first_s


def _microbatches(spans: Sequence[SwapSpan]) -> int:
    return len({span.step.op.microbatch for span in spans})
