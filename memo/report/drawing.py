"""Makes drawings of plans and runs as SVG, PNG or PDF. Matplotlib is optional and loaded only to draw."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memo.artifacts.regular_file import replace_file
from memo.errors import ArtifactError, ConfigError, writing
from memo.units import GIB, MIB

_FORMATS = (".svg", ".png", ".pdf")
_DPI = 110


def colour_of(index: int) -> tuple[float, float, float]:
    """A colour that is light enough for black text; consecutive indices have different colours."""
    from matplotlib import colormaps

    red, green, blue = colormaps["Set2"].colors[index % 8]  # type: ignore[attr-defined]
    return red, green, blue


def byte_unit(most_bytes: float) -> tuple[int, str]:
    """(bytes, name) of the unit for an axis that reaches to `most_bytes`."""
    return (GIB, "GiB") if most_bytes >= GIB else (MIB, "MiB")


def check_suffix(path: str | Path) -> None:
    """Raises ConfigError for a file whose suffix is no format of drawings."""
    if Path(path).suffix not in _FORMATS:
        raise ConfigError(f"a drawing goes to {path}, but its suffix must be one of {', '.join(_FORMATS)}")


def panels(
    what: str | Path, width_inches: float, height_inches: float, heights: Sequence[float] = (1,), sharex: bool = True
) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, one below another, in the style of all drawings of memo.

    The figure is not registered with pyplot, which would keep it alive. `what`: the name of the drawing for the message
    if matplotlib is missing; `heights`: of the axes, relative to each other.
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


def encoded(figure: Any, form: str = "png") -> bytes:
    """The figure as the content of a file: text stays text, and there is no date, so that equal drawings are equal
    files."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of runs and files may have dollar signs, which would mark formulas
    dated = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}[form]
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memo", "font.family": "sans-serif"}):
        figure.savefig(file, format=form, dpi=_DPI, metadata={dated: None})
    return file.getvalue()


def save_figure(figure: Any, path: str | Path) -> None:
    """Raises ArtifactError for a file that cannot be written."""
    with writing(path, ArtifactError):
        replace_file(path, encoded(figure, Path(path).suffix[1:]))
