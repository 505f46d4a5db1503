"""Programs in a process of their own, on an emulated GPU of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from memo.emulated_gpu.launch import LIBRARIES, Device, environment

DEFAULT = Device()


def run(tmp_path: Path, program: str, device: Device = DEFAULT, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the Python program prints; `variables` are added to its environment."""
    env = {**environment(device, tmp_path / "gpu.txt"), **variables}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=240)


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
