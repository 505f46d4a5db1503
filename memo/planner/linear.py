"""A small linear program: the most gain of shares in [0, 1] under upper bounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memo.errors import PlanError

_TOLERANCE = 1e-10
"""The finest HiGHS accepts; its default of 1e-7 would show in shares of hundreds of GiB."""


@dataclass(frozen=True)
class Row:
    """sum of coefficients[i] x share[i] <= bound, with no coefficient below 0."""

    coefficients: tuple[float, ...]
    bound: float


def maximize(gains: Sequence[float], rows: Sequence[Row]) -> list[float] | None:
    """Shares in [0, 1] with the largest sum of gain x share; None when not even zero meets every row.

    Solved through PuLP by HiGHS, or by CBC where highspy is not installed (nine digits then).
    Raises PlanError when the solver gives up.
    """
    if any(row.bound < 0 for row in rows):
        return None
    import pulp  # here, because importing it takes as long as a hundred solves

    problem = pulp.LpProblem("shares", pulp.LpMaximize)
    shares = [problem.add_variable(f"share_{i:03d}", 0, 1) for i in range(len(gains))]
    # Bytes and seconds side by side span twelve digits: every row, and the gains, are scaled to 1.
    problem += pulp.lpDot(_scaled(gains, max(gains, default=0.0)), shares)
    for row in rows:
        largest = max(row.coefficients, default=0.0)
        if sum(row.coefficients) > row.bound:  # else it can never bind
            problem += pulp.lpDot(_scaled(row.coefficients, largest), shares) <= row.bound / largest
    problem.solve(_solver(pulp))
    # Not `status`, which says "optimal" for a solution that ran out of time too.
    if problem.sol_status != pulp.LpSolutionOptimal:
        status = pulp.LpSolution[problem.sol_status]
        raise PlanError(
            f"the linear program of --offload-alpha ended as '{status}' instead of 'Optimal Solution Found': "
            "give --offload-alpha as a number"
        )
    # A variable with neither gain nor row is unknown to the solver: it moves for nothing.
    return [min(1.0, max(0.0, share.varValue or 0.0)) for share in shares]


def _scaled(values: Sequence[float], largest: float) -> list[float]:
    return [value / largest if largest > 0 else 0.0 for value in values]


def _solver(pulp: Any) -> Any:
    highs = pulp.HiGHS(msg=False, primal_feasibility_tolerance=_TOLERANCE, dual_feasibility_tolerance=_TOLERANCE)
    return highs if highs.available() else pulp.PULP_CBC_CMD(msg=False)
