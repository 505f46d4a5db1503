"""The Dockerfile copies what exists, what .dockerignore lets through, and all that the package is built from."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copied() -> set[str]:
    lines = re.findall(r"^COPY (.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return {name for line in lines for name in line.split()[:-1]}


def test_what_is_copied_exists_and_is_let_through() -> None:
    assert all((ROOT / name).exists() for name in copied())
    let_through = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(let_through) == copied()


def test_nothing_that_the_package_is_built_from_is_missing() -> None:
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "memo", "kernels", "csrc"}
    assert needed <= copied()
