"""docs/lora.md: its commands for the small model in turn, as a shell runs them, and its Python; its tables."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chats import write_lines, write_llama

from memo.checkpoint.hugging_face.adapters import ADAPTER_FILE
from memo.config.run import RunConfig, section_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lora.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SMALL = [text for kind, text in BLOCKS if not kind and re.search(r"runs/(demo|lora)\b|merged", text)]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
FLAGS_OF_COMMANDS = {
    *("train-data", "chat-form", "chat-template", "eval-fraction"),
    *("merge-adapters", "base", "model", "objective"),
}
"""Of commands, and no fields of a run."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With what the page begins from: a small model, here with random weights, and sums of two digits."""
    pytest.importorskip("peft")
    write_llama(tmp_path / "runs" / "demo" / "model", max_positions=512)
    sums = itertools.product(range(1, 10), range(1, 10))
    write_lines(tmp_path / "chats.jsonl", [{"prompt": f"{a} + {b} =", "completion": str(a + b)} for a, b in sums])
    return tmp_path


def _run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.full
def test_the_page_works_word_by_word(folder: Path) -> None:
    assert len(SMALL) == 4 and len(PYTHON) == 1
    memo = f'memo() {{ "{sys.executable}" -m memo "$@" ; }}\n'
    learned = _run(folder, "bash", "-e", "-c", memo + SMALL[0])
    before, after = map(float, re.findall(r"nats a token: ([\d.]+) before, ([\d.]+) after", learned)[0])
    assert after < before - 0.5 and "adapter: an adapter of LlamaForCausalLM" in learned
    written, exported = ((folder / name / ADAPTER_FILE).read_bytes() for name in ("adapter", "runs/lora/hf"))
    assert written == exported
    answer = _run(folder, sys.executable, "-c", PYTHON[0])
    assert "2 + 2 =" in answer
    merged = _run(folder, "bash", "-e", "-c", memo + SMALL[1])
    assert "merged: LlamaForCausalLM" in merged and merged.splitlines()[-1].strip() in answer
    more = _run(folder, "bash", "-e", "-c", memo + SMALL[2])
    begun = float(re.findall(r"nats a token: ([\d.]+) before", more)[0])
    assert abs(begun - after) < 2e-4  # two roundings to the digits that are printed
    in_4_bits = _run(folder, "bash", "-e", "-c", memo + SMALL[3])
    before, after = map(float, re.findall(r"nats a token: ([\d.]+) before, ([\d.]+) after", in_4_bits)[0])
    assert after < before - 0.5


def test_the_tables_name_flags_that_there_are() -> None:
    named = set(re.findall(r"`--([a-z][\w-]*)", "\n".join(line for line in PAGE.splitlines() if line[:1] == "|")))
    assert len(named) > 40
    for name in named - FLAGS_OF_COMMANDS:
        assert section_of(name.replace("-", "_"), "the page") or hasattr(RunConfig, name), name
