"""Only memo/planner/ makes plans: others ask it for them where this says, and build none themselves."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANS = {"Fetch", "StatePlan", "StateStep", "SwapPlan", "SwapStep", "MemoryPlan", "SwapSolution"}
ASKED_BY = {
    "swap_plan": {"memo/simulate/swapping.py", "memo/train/swap.py"},
    "placed_state_plan": {"memo/simulate/state_traffic.py", "memo/train/tiled_layers.py"},
    "solve_trace": {"memo/cli/solve.py", "memo/train/planned_memory.py"},
}
"""Who asks for the plan of a run, by the function that makes it."""


def calls() -> dict[str, set[str]]:
    """Files outside of memo/planner/ by the name that they call."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "memo").rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        if file.startswith("memo/planner/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                found[name].add(file)
    return found


def test_only_the_planner_makes_plans() -> None:
    found = calls()
    assert {name: found[name] for name in PLANS if name in found} == {}
    assert {name: found[name] for name in ASKED_BY} == ASKED_BY
    assert "state_plan" not in found  # placed_state_plan() calls it
