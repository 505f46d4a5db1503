"""The installed packages that memo needs, with the packages that these need in turn."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "memo-train"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def needed(*extras: str) -> set[str]:
    """Return the names of installed packages that memo with `extras` needs on this machine, without memo itself."""
    seen: dict[str, set[str]] = {}
    _add(OURS, frozenset(extras), seen)
    return seen.keys() - {OURS}


def _add(name: str, extras: frozenset[str], seen: dict[str, set[str]]) -> None:
    new = set(extras) - seen.get(name, set())
    if name in seen and not new:
        return
    seen.setdefault(name, set()).update(extras)
    try:
        asked = _ours() if name == OURS else requires(name) or []
    except PackageNotFoundError:  # for another platform, or not installed
        del seen[name]
        return
    for requirement in map(Requirement, asked):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            _add(canonicalize_name(requirement.name), frozenset(requirement.extras), seen)


def _ours() -> list[str]:
    """Return memo's requirements from pyproject.toml: the metadata of an installation may be older."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = [
        f'{text} {"and" if ";" in text else ";"} extra == "{extra}"'
        for extra, texts in project["optional-dependencies"].items()
        for text in texts
    ]
    return [*project["dependencies"], *extras]
