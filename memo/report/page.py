"""Renders pages of HTML from the folder templates/; every value is escaped."""

import base64
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from memo.units import GIB, format_bytes, format_count

if TYPE_CHECKING:
    from jinja2 import Environment

UNKNOWN = "-"


def rendered(template: str, **values: object) -> str:
    """Render a template with `values`; a missing value is an error."""
    return _templates().get_template(template).render(values)


def embedded(png: bytes) -> str:
    """The data URL of a picture, to embed it in a page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def shown(value: object, form: str = "{}") -> str:
    """A value in a form of str.format; UNKNOWN for None."""
    return UNKNOWN if value is None else form.format(value)


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"bytes": format_bytes, "count": format_count, "embedded": embedded, "shown": shown}
    found.filters["gib"] = lambda num_bytes: f"{num_bytes / GIB:,.2f}"
    return found
