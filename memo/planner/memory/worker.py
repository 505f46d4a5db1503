"""A solver in a process of its own, which can be killed; `memo.planner.memory.exact` starts it.

HiGHS and OR-tools cannot be loaded into one process, and some solvers overrun their time limit. The task is JSON, and
so is each line of the answer, written as soon as it is known: {"offsets": [...]}, {"bound": n}, and last
{"done": true} when nothing was cut short.
"""

import importlib
import sys

from memo.planner.memory.task import Task


def main() -> None:
    """argv: the module beside this one whose `solve` is asked."""
    task = Task.from_json(sys.stdin.read())
    importlib.import_module(f"memo.planner.memory.{sys.argv[1]}").solve(task)
