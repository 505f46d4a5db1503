"""Who serves memory on a GPU where no flag says it: a plan, and torch's allocator with expandable segments the rest."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from own_process import run

from memo.data import build_corpus

SMALL = (
    "--model llama-tiny --num-layers 2 --seq-len 64 --train-iters 3 --device cuda --offload-alpha off "
    "--attention-backend flash --num-threads 1 --peak-tflops 1 --no-progress"
)
FLAGS = f"{SMALL} --mock-data --memory-planner-min-bytes 4096"
PROGRAM = """
    import json, os
    from memo.emulated_gpu.face import EmulatedGpu
    from memo.train.entry import main
    assert main({flags!r}.split()) == 0
    print(json.dumps(EmulatedGpu().counts()))
"""


class Run(NamedTuple):
    said: str
    counts: dict[str, int]
    """Calls of CUDA."""

    @property
    def is_expandable(self) -> bool:
        """Whether torch's allocator maps memory into segments; else it asks for one after another."""
        assert ("cuMemCreate" in self.counts) != ("cudaMalloc" in self.counts), self.counts
        return "cuMemCreate" in self.counts


def train(tmp_path: Path, flags: str = FLAGS, **variables: str) -> Run:
    done = run(tmp_path, PROGRAM.format(flags=flags), **variables)
    assert done.returncode == 0, done.stderr
    return Run(done.stdout, json.loads(done.stdout.splitlines()[-1]))


def without_compiler(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "no programs").mkdir()
    return {"CXX": "/nonexistent", "PATH": str(tmp_path / "no programs"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_a_step_is_planned(tmp_path: Path) -> None:
    found = train(tmp_path)
    (report,) = re.findall(
        r"planned memory: (\d+) of (\d+) requests at their address, at most .* reserved$", *line(found)
    )
    assert report[0] == report[1] != "0"
    assert "no plan takes less" in found.said or "another plan could take" in found.said
    assert found.is_expandable  # for what is not planned


def line(found: Run) -> list[str]:
    """The one about planned memory at the end."""
    return [said for said in found.said.splitlines() if said.startswith("planned memory: ")]


def test_without_a_compiler_segments_are_expandable_and_the_run_says_so(tmp_path: Path) -> None:
    found = train(tmp_path, **without_compiler(tmp_path))
    served = "torch's own allocator serves it with expandable_segments: there is no C++ compiler"
    assert f"\nmemory of a step: not planned, {served}" in found.said
    assert line(found) == [
        "planned memory: none (there is no C++ compiler for the native allocator: install g++ or set CXX)"
    ]
    assert found.is_expandable


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_configured_stays(tmp_path: Path, name: str) -> None:
    configured = {name: "max_split_size_mb:512"}
    assert not train(tmp_path, **configured).is_expandable
    found = train(tmp_path, **without_compiler(tmp_path), **configured)
    assert "\nmemory of a step: not planned, torch's own allocator serves it: there is no C++ compiler" in found.said
    assert not found.is_expandable


def test_off_leaves_all_to_torch(tmp_path: Path) -> None:
    flags = FLAGS.replace("--memory-planner-min-bytes 4096", "--memory-planner off")
    found = train(tmp_path, flags, **without_compiler(tmp_path))
    assert "planned" not in found.said and "\nmemory: " not in found.said
    assert not found.is_expandable


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_packed_documents_are_planned(tmp_path: Path, backend: str) -> None:
    """Documents end elsewhere in each step."""
    (tmp_path / "text.txt").write_text("".join(f"{'a word ' * (i % 7)}of a document\n" for i in range(100)))
    build_corpus([tmp_path / "text.txt"], tmp_path / "corpus")
    flags = f"{SMALL} --data-path {tmp_path}/corpus --memory-planner-min-bytes 4096".replace("flash", backend)
    found = train(tmp_path, flags)
    (report,) = re.findall(
        r"planned memory: (\d+) of (\d+) requests at their address, at most .* reserved$", *line(found)
    )
    assert report[0] == report[1] != "0"
    assert found.is_expandable
