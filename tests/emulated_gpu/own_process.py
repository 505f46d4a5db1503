"""Programs in processes of their own, on emulated GPUs of their own. A server forks them (tests/support/forked.py)."""

import os
import subprocess
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from forked import Kind, Process, finish, fork, own_store, world

from memo.emulated_gpu.launch import LIBRARIES, Device, environment

DEFAULT = Device()


def start(
    tmp_path: Path,
    program: str | Path,
    device: Device | None = DEFAULT,
    arguments: Sequence[str] = (),
    **variables: str,
) -> Process:
    """The text of a Python program, or its file, on `device`, or on one like this process's own.

    `variables` are added to its environment.
    """
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    env = dict(os.environ) if device is None else environment(device, folder / "gpu.txt")
    is_file = isinstance(program, Path)
    what = program if is_file else textwrap.dedent(str(program))
    kind: Kind = "file" if is_file else "program"
    return fork(kind, what, arguments, {**env, **variables}, folder / "out", folder / "err")


def run(
    tmp_path: Path,
    program: str | Path,
    device: Device | None = DEFAULT,
    arguments: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """As `start`; how it ended."""
    process = start(tmp_path, program, device, arguments, **variables)
    status = process.wait()
    return subprocess.CompletedProcess([str(program), *arguments], status, process.out, process.err)


def run_ranks(tmp_path: Path, num_ranks: int, program: Path, device: Device, arguments: Sequence[str]) -> list[str]:
    """What each rank prints. Ranks get the variables that torchrun sets, and a store as torchrun keeps one.

    Raises AssertionError with the errors of the first that fails; the others are ended.
    """
    store = own_store()
    ranks = [start(tmp_path, program, device, arguments, **its) for its in world(num_ranks, store)]
    finish(ranks)
    return [rank.out for rank in ranks]


def outside() -> dict[str, str]:
    """The environment of this process as it was before it ran on the emulated GPU: that of a user's shell.

    Its cache is the one that the libraries are in, so that they are not built once more.
    """
    folder = os.environ[LIBRARIES]
    env = {**os.environ, "XDG_CACHE_HOME": str(Path(folder).parents[2])}
    for name in (LIBRARIES, "EMULATED_GPU"):
        del env[name]
    for name, separator in (("LD_PRELOAD", ":"), ("PYTHONPATH", os.pathsep)):
        env[name] = separator.join(path for path in env[name].split(separator) if not path.startswith(folder))
    return env
