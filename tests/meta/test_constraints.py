"""constraints.txt pins all that an installation for tests brings, what the named packages need included."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OURS = "memo-train"
LINE = re.compile(r"([A-Za-z0-9._-]+)==([0-9][0-9a-z.]*)")


def _pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    found = [LINE.fullmatch(line) for line in lines]
    wrong = [line for line, match in zip(lines, found, strict=True) if match is None]
    assert not wrong, f"constraints.txt: {wrong} is no NAME==VERSION; local versions and paths are of one machine"
    return {canonicalize_name(match[1]): match[2] for match in found if match is not None}


def _ours() -> list[str]:
    """As the metadata of an installation would say it, which may be older than pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        f'{text} {"and" if ";" in text else ";"} extra == "{extra}"'
        for extra, texts in project["optional-dependencies"].items()
        for text in texts
    ]
    return [*project["dependencies"], *extras]


def _needed(name: str, extras: frozenset[str], seen: dict[str, set[str]]) -> None:
    """All installed packages that `name` with `extras` asks for on this machine, and theirs, into `seen`."""
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
            _needed(canonicalize_name(requirement.name), frozenset(requirement.extras), seen)


def _of_cuda(name: str) -> bool:
    """Packages of CUDA follow torch's build, which pins them itself."""
    return name.startswith(("nvidia-", "cuda-")) and name != "nvidia-ml-py"


def test_everything_that_the_tests_need_is_pinned() -> None:
    seen: dict[str, set[str]] = {}
    _needed(OURS, frozenset({"test"}), seen)
    assert len(seen) > 40
    missing = sorted(name for name in seen.keys() - _pins().keys() - {OURS} if not _of_cuda(name))
    assert not missing, f"constraints.txt does not pin {', '.join(missing)}: add what `pip freeze` says"


def test_nothing_of_one_machine_is_pinned() -> None:
    assert not [name for name in _pins() if _of_cuda(name)]
