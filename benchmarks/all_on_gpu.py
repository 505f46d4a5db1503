"""Run everything that a machine with a GPU should run, in half an hour: `make gpu`.

    python benchmarks/all_on_gpu.py --minutes 30

1. The planned allocator is compiled for CUDA.
2. tests/gpu and tests/kernels on the device.
3. benchmarks/run_all.py runs at full size in the time that is left; BENCHMARKS.md is written after each script.

After a step that fails the next step runs all the same. Rows are on disk as soon as they are measured, and the output
of each step is in runs/gpu/. Exit status 1 if any step failed, 2 without CUDA.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "runs" / "gpu"
BUILD = "from memo.allocator import build; print(build.library('cuda'))"


def steps(left_s: float) -> dict[str, tuple[list[str], float]]:
    """Return the steps by name: the command, and the seconds that it may take."""
    python, pytest = sys.executable, [sys.executable, "-m", "pytest", "-o", "addopts=", "-q"]
    return {
        "build": ([python, "-c", BUILD], 300.0),
        "tests_gpu": ([*pytest, "tests/gpu"], 300.0),
        "tests_kernels": ([*pytest, "tests/kernels"], 240.0),
        "benchmarks": ([python, "benchmarks/run_all.py", "--scale", "full"], left_s),
    }


def run(name: str, command: list[str], limit_s: float) -> bool:
    log = LOGS / f"{name}.txt"
    start_s = time.monotonic()
    with open(log, "w", encoding="utf-8") as output:
        try:
            status = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=limit_s
            ).returncode
            ended = f"status {status}"
        except subprocess.TimeoutExpired:
            status, ended = 1, f"ended after {limit_s:.0f} s"
    last = (log.read_text(encoding="utf-8").splitlines() or [""])[-1]
    print(f"{name}: {ended}, {time.monotonic() - start_s:.0f} s, {log}: {last}", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="for everything together")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a CUDA device, and torch finds none: `make benchmark` runs smoke sizes here", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + 60.0 * args.minutes
    good = []
    for name in steps(0.0):
        left_s = deadline_s - time.monotonic()
        command, limit_s = steps(left_s)[name]
        if name == "benchmarks":
            command = [*command, "--minutes", f"{max(0.0, left_s - 30.0) / 60:.2f}"]
        good.append(run(name, command, max(1.0, min(limit_s, left_s))))
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
