"""The paper's equations 1-3 against their closed form and against another solver."""

import dataclasses
import random
from dataclasses import dataclass

import pytest
from scipy.optimize import linprog

from memo.errors import HostMemoryError, PlanError
from memo.planner.alpha import solve_paper
from memo.planner.problem import Limit
from memo.units import GIB


@dataclass(frozen=True)
class Instance:
    """Arguments of solve_paper; every share of the range of each limit occurs."""

    always_bytes: float
    other_bytes: float
    layer_s: float
    bytes_per_s: float
    num_layers: int
    host_bytes: float

    @property
    def hideable_bytes(self) -> float:
        return self.layer_s * self.bytes_per_s

    @property
    def records(self) -> int:
        return max(0, self.num_layers - 2)


def feasible_instance(rng: random.Random) -> Instance:
    always = 10 ** rng.uniform(3, 11)
    other = always * rng.uniform(0.1, 9)
    rate = 10 ** rng.uniform(9, 11)
    layers = rng.randint(1, 96)
    return Instance(
        always_bytes=always,
        other_bytes=other,
        layer_s=(always + rng.uniform(0, 1.6) * other) / rate,
        bytes_per_s=rate,
        num_layers=layers,
        host_bytes=layers * (always + rng.uniform(0, 1.6) * other),
    )


def closed_form(case: Instance) -> float:
    bounds = [1.0, (case.hideable_bytes - case.always_bytes) / case.other_bytes]
    if case.records:
        bounds.append((case.host_bytes / case.records - case.always_bytes) / case.other_bytes)
    return min(bounds)


def other_solver(case: Instance) -> float:
    """Equations 2 and 3 in units of S_others, and of (n - 2) S_others."""
    bounds = [(case.hideable_bytes - case.always_bytes) / case.other_bytes]
    bounds += [(case.host_bytes - case.records * case.always_bytes) / case.other_bytes]
    result = linprog([-1.0], A_ub=[[1.0], [case.records]], b_ub=bounds, bounds=[(0, 1)], method="highs-ds")
    assert result.success
    return float(result.x[0])


def test_200_random_instances_equal_the_closed_form_and_another_solver() -> None:
    rng = random.Random(0)
    limits = []
    for _ in range(200):
        case = feasible_instance(rng)
        answer = solve_paper(**dataclasses.asdict(case))
        assert answer.alpha == pytest.approx(closed_form(case), abs=1e-9)
        assert answer.alpha == pytest.approx(other_solver(case), abs=1e-9)
        limits.append(answer.limit)
    # Each outcome must have been tried, or agreement would prove little.
    assert min(limits.count(limit) for limit in (Limit.OFFLOAD, Limit.HOST, Limit.EVERYTHING)) >= 20


def test_the_limit_that_binds_is_named() -> None:
    case = Instance(GIB, 7 * GIB, 0.4, 10 * GIB, 34, 1000 * GIB)  # 4 GiB pass in a forward
    assert solve_paper(**dataclasses.asdict(case)).limit == Limit.OFFLOAD
    assert solve_paper(**dataclasses.asdict(case)).alpha == pytest.approx(3 / 7, abs=1e-12)
    scarce = dataclasses.replace(case, host_bytes=64 * GIB)  # 2 GiB for each of 32 layers
    assert solve_paper(**dataclasses.asdict(scarce)).limit == Limit.HOST
    assert solve_paper(**dataclasses.asdict(scarce)).alpha == pytest.approx(1 / 7, abs=1e-12)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_last_two_layers_need_no_host_memory(num_layers: int) -> None:
    answer = solve_paper(GIB, 7 * GIB, 1.0, 10 * GIB, num_layers, host_bytes=0)
    assert (answer.alpha, answer.limit) == (1.0, Limit.EVERYTHING)


def test_what_always_moves_may_fill_a_limit_exactly() -> None:
    assert solve_paper(4 * GIB, 7 * GIB, 0.5, 8 * GIB, 34, 1000 * GIB).alpha == 0.0
    assert solve_paper(GIB, 7 * GIB, 0.5, 8 * GIB, 34, 32 * GIB).alpha == 0.0


def test_infeasible_at_alpha_zero_names_the_equation_that_fails() -> None:
    with pytest.raises(PlanError, match=r"link \(offload\).*8\.00 GiB.*only 5\.00 GiB.*longer sequence"):
        solve_paper(8 * GIB, GIB, 0.5, 10 * GIB, 32, 1000 * GIB)
    with pytest.raises(HostMemoryError, match=r"host memory.*30 records x 1\.00 GiB = 30\.00 GiB.*10\.00 GiB"):
        solve_paper(GIB, GIB, 0.5, 10 * GIB, 32, 10 * GIB)
