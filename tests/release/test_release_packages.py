"""sdist and wheel, as `make dist` builds them: all that memo needs and no more, and an installation that works.

The wheel is installed into an environment that has memo's dependencies alone, without the extras of the tests, and is
used from a folder far from the repository.
"""

import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from environments import Environment
from sources import copy_tracked, tracked

import memo

NATIVE = {"allocator": ("core", "torch", "cuda"), "emulated_gpu": ("emulated_gpu",)}
"""Folders of csrc/ by the package of memo that compiles them on first use."""

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both, built from what git tracks: the sdist, and the wheel from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy_tracked(source)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", out, source], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    assert found.name == f"memo_train-{memo.__version__}-py3-none-any.whl", "one wheel serves every torch"
    return found


def sources(prefix: str) -> set[str]:
    return {name for name in tracked() if name.startswith(prefix)}


def native() -> set[str]:
    return {name for folders in NATIVE.values() for folder in folders for name in sources(f"csrc/{folder}/")}


def test_the_wheel_holds_memo_its_kernels_and_its_native_sources(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = sources("memo/") | {name.removeprefix("kernels/") for name in sources("kernels/")}
    for package, folders in NATIVE.items():
        wanted |= {f"memo/{package}/{name}" for folder in folders for name in sources(f"csrc/{folder}/")}
    ours = {name for name in names if not name.startswith(f"memo_train-{memo.__version__}.dist-info/")}
    assert ours == wanted
    assert f"memo_train-{memo.__version__}.dist-info/licenses/LICENSE" in names


def test_the_sdist_holds_what_the_wheel_is_built_from(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    top = f"memo_train-{memo.__version__}/"
    with tarfile.open(found) as archive:
        names = {member.name.removeprefix(top) for member in archive.getmembers() if member.isfile()}
    own = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    added = {name for name in names if name.startswith("memo_train.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - added == own | sources("memo/") | sources("kernels/") | native()


def test_an_index_takes_both(built: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_memo_works_where_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    away, cache = tmp_path / "away", tmp_path / "cache"
    away.mkdir()
    installed = Environment(tmp_path / "environment")

    def run(line: str) -> str:
        return installed.run(*shlex.split(line), folder=away, XDG_CACHE_HOME=str(cache), OMP_NUM_THREADS="1")

    # Without an index: everything that memo asks for must be there already.
    run(f"python -m pip install --no-index --disable-pip-version-check {wheel}")
    run("python -m pip check --disable-pip-version-check")
    for module in ("memo", "memo_kernels"):
        assert run(f"python -c 'import {module}; print({module}.__file__)'").startswith(str(installed.site))
    assert "memo COMMAND --help" in run("memo --help")
    plan = run("memo plan --model llama-3.1-8b --gpus 8 --hardware h100-80 --seq-len 128K --gbs 16 --top 1")
    assert "131,072 tokens x 16 sequences" in plan
    assert "131,072 tokens" in run("memo estimate --model llama-3.1-8b --tp 4 --cp 2 --seq-len 128K")
    # The native allocator is compiled from the sources in the wheel.
    small = "--model llama-tiny --mock-data --seq-len 128 --train-iters 4 --num-threads 1 --no-progress --save run"
    trained = run(f"memo train {small} --offload-alpha 0.5 --memory-planner auto")
    assert "iteration 4/4" in trained and "requests at their address" in trained, trained
    assert list((cache / "memo" / "allocator").glob("cpu-*.so"))
    assert "LlamaForCausalLM" in run("memo export run --out model")
    emulator = "from memo.emulated_gpu.build import source_root; print(source_root())"
    assert run(f"python -c '{emulator}'").startswith(str(installed.site))
