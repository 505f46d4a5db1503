"""Programs in a process of their own, on an emulated GPU of their own."""

import subprocess
import sys
import textwrap
from pathlib import Path

from memo.emulated_gpu.launch import Device, environment

DEFAULT = Device()


def run(tmp_path: Path, program: str, device: Device = DEFAULT, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the Python program prints; `variables` are added to its environment."""
    env = {**environment(device, tmp_path / "gpu.txt"), **variables}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=240)
