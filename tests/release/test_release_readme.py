"""The README's way from nothing to a model of one's own, word by word: its commands in turn, in a fresh copy.

Only the installation is spared: `.venv` exists, with memo's own dependencies and none of the tests'.
"""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
from environments import Environment
from one_cpu import on_one_cpu
from sources import copy_tracked

ROOT = Path(__file__).parents[2]
LOSSES = re.compile(r"loss of held-out answers, nats a token: ([\d.]+) before, ([\d.]+) after")


def commands() -> list[str]:
    """Those below "Try it", without what is said of them; continuations are joined."""
    found = re.search(r"^## Try it\n.*?^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return [line.partition("  #")[0].rstrip() for line in found[1].replace("\\\n   ", "").splitlines()]


def test_they_are_five_at_most_and_the_demo_ends_with_those_that_follow_it() -> None:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    told = demo.NEXT.replace("\\\n   ", "").splitlines()
    assert commands()[0] == "make demo" and 2 <= len(commands()) <= 5
    assert set(commands()[1:]) <= set(told), told


@pytest.mark.full
def test_from_nothing_to_a_model_of_ones_own(tmp_path: Path) -> None:
    copy = tmp_path / "memo"
    copy_tracked(copy)
    Environment(copy / ".venv").link_memo(copy)
    (copy / ".venv" / "memo").touch()  # what `make demo` installs
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    lines = [{"prompt": f"{a} times {b}", "completion": f"{a * b}"} for a, b in pairs]
    (copy / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script = "set -euo pipefail\n" + "\n".join(commands())
    outside = {"PATH": "/usr/local/bin:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    with on_one_cpu():
        done = subprocess.run(
            ["bash", "-c", script], check=False, cwd=copy, env=outside, capture_output=True, text=True
        )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    losses = LOSSES.search(done.stdout)
    assert losses is not None and float(losses[2]) < float(losses[1]) / 2, done.stdout[-4000:]
    answer = done.stdout.partition("exported LlamaForCausalLM to runs/mine/hf\n")[2]
    assert answer.strip() and "User:" not in answer, done.stdout[-500:]
