"""Drawings of plans and runs, as SVG, PNG or PDF. Matplotlib is optional and loaded only to draw."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memo.artifacts.regular_file import replacing
from memo.errors import ArtifactError, ConfigError, writing
from memo.units import GIB, MIB

_FORMATS = (".svg", ".png", ".pdf")
_DPI = 110


def colour_of(index: int) -> tuple[float, float, float]:
    """A colour that is light enough for black text; consecutive indices have different ones."""
    from matplotlib import colormaps

    red, green, blue = colormaps["Set2"].colors[index % 8]  # type: ignore[attr-defined]
    return red, green, blue


def byte_unit(most_bytes: float) -> tuple[int, str]:
    """The unit of an axis that reaches so far."""
    return (GIB, "GiB") if most_bytes >= GIB else (MIB, "MiB")


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
