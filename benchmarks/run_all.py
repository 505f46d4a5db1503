"""Run the whole set of benchmarks, the most important table first, then write BENCHMARKS.md.

    make benchmark                                          # smoke size on a CPU, full size on CUDA
    python benchmarks/run_all.py --scale full --minutes 25  # each script gets its share of the time

A script that fails or runs out of time keeps the rows that it has, and the next one runs.
"""

import subprocess
import sys
import time
from pathlib import Path

import report
from scales import arguments

HERE = Path(__file__).parent
SCRIPTS = {
    # name: share of the time that is left when the script starts
    "gpu_accuracy": 0.35,
    "table3_end_to_end": 0.35,
    "table4_ablation": 0.2,
    "peers": 0.3,
    "kernels": 0.2,
    "offload_states": 0.3,
    "convergence": 0.25,
    "copies": 0.1,
    "overlap": 0.35,
    "allocator": 0.4,
    "reach": 1.0,
}
"""In order of priority."""


def main() -> int:
    args = arguments(__doc__)
    failed = []
    for name, share in SCRIPTS.items():
        command = [sys.executable, str(HERE / f"{name}.py"), "--scale", args.scale.name]
        if args.left_s != float("inf"):
            command += ["--minutes", f"{max(0.0, share * args.left_s) / 60:.2f}"]
        start_s = time.monotonic()
        status = subprocess.run(command, check=False).returncode
        print(f"{name}: status {status}, {time.monotonic() - start_s:.0f} s", flush=True)
        if status:
            failed.append(name)
        report.write()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
