"""Compares loss curves with every alpha and without swapping, at the size of this set of benchmarks (MEMO, figure 12d).

    python benchmarks/convergence.py

Runs swap_convergence.py, which also runs at other sizes; it fails if a loss depends on alpha.
"""

import subprocess
import sys
from pathlib import Path

from scales import arguments

SCRIPT = Path(__file__).with_name("swap_convergence.py")


def main() -> None:
    args = arguments(__doc__)
    scale = args.scale
    flags = ["--steps", str(scale.convergence_steps), "--device", scale.device]
    if scale.name == "smoke":
        flags += ["--seq-length", "64", "--num-threads", "1"]
    command = [sys.executable, str(SCRIPT), *flags, "--results", f"{scale.name}/convergence"]
    left_s = None if args.left_s == float("inf") else max(1.0, args.left_s)
    try:
        raise SystemExit(subprocess.run(command, check=False, timeout=left_s).returncode)
    except subprocess.TimeoutExpired:
        raise SystemExit("no time was left: nothing is kept of an unfinished comparison") from None


if __name__ == "__main__":
    main()
