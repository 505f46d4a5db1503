"""docs/python.md: every example runs as it stands, and every public name of memo has one."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import memo
from memo.config import HardwareConfig
from memo.train import setup

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other workers of the tests use the other cores."""
    real = setup.place_on_host

    def place(hardware: HardwareConfig, device: torch.device, microbatch_flops: float) -> str:
        return real(replace(hardware, num_threads=1), device, microbatch_flops)

    monkeypatch.setattr(setup, "place_on_host", place)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What is logged to a stand-in for the package, which the tests do not install."""
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=lambda values, step: logged.append(values), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project, mode: run))
    return logged


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
@pytest.mark.usefixtures("one_thread")
def test_examples_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: list[dict[str, float]]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[number], f"{PAGE.name}, example {number + 1}", "exec"), {"__name__": "__main__"})
    assert len(wandb) == (2 if "import wandb" in EXAMPLES[number] else 0)


def test_every_public_name_is_used_in_an_example() -> None:
    for name in set(memo.__all__) - {"__version__"}:
        assert any(f"memo.{name}" in example for example in EXAMPLES), f"docs/python.md has no example of memo.{name}"


def test_a_name_that_memo_does_not_have_is_refused() -> None:
    with pytest.raises(AttributeError, match="trainer"):
        memo.trainer  # noqa: B018


def test_dir_shows_the_api_and_nothing_else() -> None:
    assert dir(memo) == sorted(memo.__all__)
    assert all(getattr(memo, name) is not None for name in dir(memo))
