"""Measures the nanoseconds that the planned allocator adds to a request and its free; the bound is 200.

    python benchmarks/allocator_overhead.py

Builds csrc/test/core_bench.cpp with the flags of the allocator and runs it: only the core, on one thread, with 1 to
1,000 live blocks; the time of the native allocator is left out. The bound is for the two kinds of request in training:
a planned request, at each number of live blocks, and a request that is passed on. Recording and falling back are
reported without a bound. Exit status: 1 if the bound is not met. Run it on an idle machine.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rows

from memo.allocator import build

BOUND_NS = 200.0
BOUNDED = ("passthrough", "planned")
"""First words of the cases that have the bound."""


def measure(iterations: int) -> list[dict[str, Any]]:
    """Return one row for each case of core_bench.cpp."""
    sources = [build.source_root() / name for name in ("core/planned_core.cpp", "test/core_bench.cpp")]
    flags = [flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC")]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "core_bench"
        compiler = build.find_compiler()
        subprocess.run([compiler, *flags, *map(str, sources), "-pthread", "-o", str(program)], check=True)
        done = subprocess.run([str(program), str(iterations)], check=True, capture_output=True, text=True)
    found = re.findall(r"^(\S.*?) +([\d.]+) ns$", done.stdout, re.MULTILINE)
    return [
        {
            "case": case,
            "ns_per_request": float(ns),
            "bound_ns": BOUND_NS if case.startswith(BOUNDED) else None,
            "iterations": iterations,
            "compiler": compiler,
        }
        for case, ns in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=2000, help="of 4,000 requests each, for every case")
    found = measure(parser.parse_args().iterations)
    for row in found:
        bound = f"  bound {row['bound_ns']:.0f} ns" if row["bound_ns"] else ""
        print(f"{row['case']:<34} {row['ns_per_request']:7.1f} ns{bound}")
    print(f"kept in {rows.write('allocator_overhead', found)}")
    return int(any(row["bound_ns"] and row["ns_per_request"] >= row["bound_ns"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
