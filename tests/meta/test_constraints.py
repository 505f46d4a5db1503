"""constraints.txt pins all that an installation for tests brings, what the named packages need included."""

import re
from pathlib import Path

from packaging.utils import canonicalize_name
from requirements import needed

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"([A-Za-z0-9._-]+)==([0-9][0-9a-z.]*)")


def _pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    found = [LINE.fullmatch(line) for line in lines]
    wrong = [line for line, match in zip(lines, found, strict=True) if match is None]
    assert not wrong, f"constraints.txt: {wrong} is no NAME==VERSION; local versions and paths are of one machine"
    return {canonicalize_name(match[1]): match[2] for match in found if match is not None}


def _of_cuda(name: str) -> bool:
    """Packages of CUDA follow torch's build, which pins them itself."""
    return name.startswith(("nvidia-", "cuda-")) and name != "nvidia-ml-py"


def test_everything_that_the_tests_need_is_pinned() -> None:
    names = needed("test")
    assert len(names) > 40
    missing = sorted(name for name in names - _pins().keys() if not _of_cuda(name))
    assert not missing, f"constraints.txt does not pin {', '.join(missing)}: add what `pip freeze` says"


def test_nothing_of_one_machine_is_pinned() -> None:
    assert not [name for name in _pins() if _of_cuda(name)]
