"""Runs exact solvers in processes of their own, which are killed when their time is up, and checks their answers."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Literal, NamedTuple

import numpy as np

from memo.artifacts.python_process import python_command
from memo.planner.memory.dsa import Ints
from memo.planner.memory.greedy import settle
from memo.planner.memory.overlaps import Overlaps
from memo.planner.memory.task import Task

Exact = Literal["auto", "cpsat", "mip", "none"]

NAMES = {"cpsat": "CP-SAT", "mip": "MIP"}
_PACKAGES = {"cpsat": "ortools", "mip": "pulp and highspy"}
MAX_PAIRS = {"cpsat": 400_000, "mip": 500}
"""The most pairs of blocks alive together with which a solver is useful: with 900, HiGHS finds nothing in 20 s that is
better than a greedy order, while CP-SAT finds the optimum in one second."""


class SolverAnswer(NamedTuple):
    """Offsets in units (the given ones if none were better), a proven bound, and whether the search was complete."""

    offsets: Ints
    bound: int
    is_done: bool


def choose(exact: Exact, num_pairs: int) -> str | None:
    """The solver for so many pairs, or None; "auto" is CP-SAT if OR-tools is installed, else the MIP."""
    if exact == "auto":
        exact = "cpsat" if find_spec("ortools") else "mip"
    return exact if exact != "none" and num_pairs <= MAX_PAIRS[exact] else None


def run(solver: str, task: Task, overlaps: Overlaps) -> SolverAnswer:
    """Run `solver` until time.time() is `task.end_s`.

    If it breaks down, its earlier answers are used, and a warning with its exit status is printed on standard error.
    """
    best, bound, is_done = task.offsets, task.bound, False
    for line in _lines(solver, task):
        fields = json.loads(line)
        if "offsets" in fields:
            offsets = settle(task.instance, overlaps, np.array(fields["offsets"], dtype=np.int64))
            best = min(best, offsets, key=task.instance.peak)
        bound = max(bound, fields.get("bound", 0))
        is_done |= fields.get("done", False)
    return SolverAnswer(best, min(bound, task.instance.peak(best)), is_done)


def _lines(solver: str, task: Task) -> list[str]:
    """The lines that the process wrote before it ended, or was killed with all its children."""
    with subprocess.Popen(
        python_command("from memo.planner.memory.worker import main; main()", solver),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, to be killed with all its children
    ) as process:
        try:
            output, errors = process.communicate(task.as_json(), timeout=max(0.0, task.end_s - time.time()))
            if process.returncode:
                _tell(solver, process.returncode, errors)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:  # such as KeyboardInterrupt
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return whole_lines(output)


def _tell(solver: str, exit_status: int, errors: str) -> None:
    """Print a warning. The exit status is minus the number of the signal that ended the process, if one did."""
    ended = f"exit status {exit_status}" if exit_status > 0 else f"signal {signal.Signals(-exit_status).name}"
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it said nothing")
    print(
        f"warning: {NAMES[solver]} broke down with {ended} ({last}): the memory plan is the best that was found "
        f"without it; leave it more memory if that ended it, else install {_PACKAGES[solver]} anew",
        file=sys.stderr,
        flush=True,
    )


def whole_lines(output: str) -> list[str]:
    """The lines that are JSON; the last one may be cut off."""
    return [line for line in output.splitlines(keepends=True) if line.startswith('{"') and line.endswith("}\n")]
