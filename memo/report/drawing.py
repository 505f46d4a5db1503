"""Drawings of plans and runs, as SVG, PNG or PDF. Matplotlib is optional and loaded only to draw."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memo.artifacts.regular_file import replacing
from memo.errors import ArtifactError, ConfigError, writing
from memo.report.timeline import Kind, SwapSpan, extent_s, kinds_of, rows_of, summary, tenancies
from memo.units import GIB, MIB

_FORMATS = (".svg", ".png", ".pdf")
_DPI = 110
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
        self.named = named  # labels name the microbatch

    def block(
        self,
        row: int,
        during_s: tuple[float, float],
        key: tuple[int, ...],
        prefix: str = "",
        colour: Any = None,
        names: bool = True,
    ) -> None:
        """`colour`: default: that of the layer. `names`: whether it has a label."""
        start_s, duration_s = during_s[0] - self.first_s, during_s[1] - during_s[0]
        colour = colour_of(key[1]) if colour is None else colour
        is_thin = duration_s / self.seconds_per_inch < _THIN_INCHES
        self.axes.barh(
            row,
            duration_s,
            _BLOCK_HEIGHT,
            left=start_s,
            color=colour,
            edgecolor=colour if is_thin else "white",  # which would cover it
            linewidth=0.8 if is_thin else 0.4,
        )
        label = prefix + ":".join(map(str, key if self.named else key[1:]))
        if names and duration_s / self.seconds_per_inch >= _CHARACTER_INCHES * len(label):
            self.axes.text(start_s + duration_s / 2, row, label, ha="center", va="center", fontsize=7)


def _legend_colour(span: SwapSpan) -> str:
    """Of compute by its direction, of a copy by what it moves."""
    return _COMPUTE_COLOURS[span.step.op.kind] if span.row == "compute" else _KIND_COLOURS[span.kind]


def _legend(figure: Any, spans: Sequence[SwapSpan], kinds: Sequence[Kind]) -> None:
    """Names the colours above the drawing."""
    from matplotlib.patches import Patch

    entries = [("forward", _COMPUTE_COLOURS["F"]), ("backward", _COMPUTE_COLOURS["B"])]
    entries += [(_KIND_NAMES[kind], _KIND_COLOURS[kind]) for kind in kinds]
    entries += [("compute waits", _WAIT_COLOUR)] if any(span.row == "wait" for span in spans) else []
    patches = [Patch(facecolor=colour, label=name) for name, colour in entries]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, fontsize=7, frameon=False)


def colour_of(index: int) -> tuple[float, float, float]:
    """A colour that is light enough for black text; consecutive indices have different ones."""
    from matplotlib import colormaps

    red, green, blue = colormaps["Set2"].colors[index % 8]  # type: ignore[attr-defined]
    return red, green, blue


def byte_unit(most_bytes: float) -> tuple[int, str]:
    """The unit of an axis that reaches so far."""
    return (GIB, "GiB") if most_bytes >= GIB else (MIB, "MiB")


def _microbatches(spans: Sequence[SwapSpan]) -> int:
    return len({span.step.op.microbatch for span in spans})


def check_suffix(path: str | Path) -> None:
    """Raises ConfigError for a file whose suffix is no format of drawings."""
    if Path(path).suffix not in _FORMATS:
        raise ConfigError(f"a drawing goes to {path}, but its suffix must be one of {', '.join(_FORMATS)}")


def panels(
    what: str | Path, width_inches: float, height_inches: float, heights: Sequence[float] = (1,), sharex: bool = True
) -> tuple[Any, list[Any]]:
    """A figure and its drawings above each other, in the one style of all our drawings.

    It is not registered with pyplot, which would keep it alive.

    Args:
        what: named in the message if matplotlib is missing.
        heights: of the drawings, relative to each other.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"drawing {what} needs the package matplotlib, which is not installed: run pip install 'memo-train[report]'"
        ) from None
    with rc_context({"axes.labelsize": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        drawn = figure.subplots(len(heights), 1, sharex=sharex, height_ratios=heights, squeeze=False)[:, 0]
    for axes in drawn:
        axes.tick_params(labelsize=8, length=2)
    return figure, list(drawn)


def png_bytes(figure: Any) -> bytes:
    """The figure as a PNG file in memory."""
    buffer = io.BytesIO()
    _as_plain_text(figure)
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def _as_plain_text(figure: Any) -> None:
    """matplotlib takes what stands between two dollars for a formula, and names of runs and files may have some."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)


def save_figure(figure: Any, path: str | Path) -> None:
    """Save a figure with text as text, and without a date, so that the same drawing is the same file."""
    from matplotlib import rc_context

    dated = {"CreationDate": None} if Path(path).suffix == ".pdf" else {"Date": None}
    metadata = {} if Path(path).suffix == ".png" else dated
    fonts = rc_context({"svg.fonttype": "none", "svg.hashsalt": "memo", "font.family": "sans-serif"})
    with writing(path, ArtifactError), replacing(path) as file, fonts:
        _as_plain_text(figure)
        figure.savefig(file, format=Path(path).suffix[1:], dpi=_DPI, metadata=metadata)
