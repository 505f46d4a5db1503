"""The parts of a node's host memory: never more than the node gives, states before activations."""

import random
import socket

import pytest
import torch
from layouts import tiny
from ranks import run_ranks

from memo.config.simulated_world import with_simulated_axes
from memo.errors import HostMemoryError
from memo.estimate.host_memory import node_budget_bytes
from memo.estimate.state_memory import state_bytes
from memo.executor import host_budget
from memo.executor.host_budget import Claim, HostBudget, budget_of, settle
from memo.mesh import init_distributed
from memo.train.build import build_mesh
from memo.train.ending import shutdown
from memo.units import GIB

CPU = torch.device("cpu")


def test_a_node_gives_nine_tenths_of_what_is_free_or_what_is_allowed_if_that_is_free() -> None:
    assert node_budget_bytes(100 * GIB, None) == 90 * GIB
    assert node_budget_bytes(100 * GIB, 40) == 40 * GIB
    assert node_budget_bytes(100 * GIB, 95) == 95 * GIB
    assert node_budget_bytes(100 * GIB, 1000) == 100 * GIB
    assert node_budget_bytes(100 * GIB, 0) == 0


ALL_FREE = Claim(100 * GIB)
STAGES = [Claim(100 * GIB, states_bytes=states * GIB) for states in (50, 10, 0)]
"""As of a pipeline, of whose stages one has far more states."""


@pytest.mark.parametrize(
    ("claims", "limit_gib", "granted_gib"),
    [
        ([ALL_FREE], None, [90]),
        ([ALL_FREE] * 8, None, [90 / 8] * 8),
        ([ALL_FREE] * 2, 0.5, [0.25] * 2),
        ([ALL_FREE] * 4, 1000, [25] * 4),
        (STAGES, 90, [60, 20, 10]),  # states come first, and the rest is shared
        (STAGES, None, [60, 20, 10]),
        ([ALL_FREE, Claim(20 * GIB)], None, [9] * 2),  # the rank that sees least decides
        # On a CPU, resident states take of the same memory.
        ([Claim(100 * GIB, device_bytes=20 * GIB), Claim(100 * GIB, device_bytes=30 * GIB)], None, [22.5] * 2),
        ([Claim(10 * GIB, device_bytes=20 * GIB)], None, [0]),
    ],
)
def test_what_each_rank_is_granted(claims: list[Claim], limit_gib: float | None, granted_gib: list[float]) -> None:
    assert [budget_of(claim, claims, limit_gib).granted_bytes for claim in claims] == [
        int(each * GIB) for each in granted_gib
    ]


def test_what_can_be_drawn_never_exceeds_what_the_node_gives() -> None:
    generator = random.Random(0)
    refused = 0
    for _ in range(2000):
        ranks, free_bytes = generator.randint(1, 16), generator.randint(0, 1 << 40)
        claims = [
            Claim(
                free_bytes + generator.randint(0, 1 << 30),
                states_bytes=generator.choice((0, generator.randint(0, 2 * free_bytes // ranks))),
                device_bytes=generator.choice((0, generator.randint(0, 1 << 30))),
            )
            for _ in range(ranks)
        ]
        limit_gib = generator.choice((None, generator.uniform(0, 2048)))
        most = min(claim.free_bytes for claim in claims) - sum(claim.device_bytes for claim in claims)
        most = max(0, most if limit_gib is None else min(most, int(limit_gib * GIB)))
        drawn = []
        for claim in claims:
            budget = budget_of(claim, claims, limit_gib)
            try:
                budget.draw("states", claim.states_bytes)
                budget.draw("activations", budget.left_bytes)
                drawn.append(budget.drawn_bytes)
            except HostMemoryError:
                refused += 1
        assert sum(drawn) <= most
        if sum(claim.states_bytes for claim in claims) <= node_budget_bytes(most, limit_gib):
            assert len(drawn) == ranks, "states that fit were refused"
    assert refused


def test_states_beyond_the_node_are_refused_with_every_number() -> None:
    claims = [Claim(100 * GIB, states_bytes=60 * GIB)] * 2
    with pytest.raises(HostMemoryError) as raised:
        budget_of(claims[0], claims).draw("states", 60 * GIB)
    assert str(raised.value) == (
        "states in host memory need 60.00 GiB, but this rank may take 45.00 GiB, its part of 90.00 GiB, as 100.00 GiB"
        " of this node are free, for 2 ranks of this node: lower --optimizer-offload-fraction, or spread the model over"
        " more nodes"
    )
    limited = budget_of(claims[0], claims, 80)
    with pytest.raises(
        HostMemoryError, match=r"40\.00 GiB, its part of --offload-host-memory-gib 80, .*: raise that flag, "
    ):
        limited.draw("states", 60 * GIB)


def _settled(hosts: list[str], free_bytes: list[int]) -> HostBudget:
    """On a rank whose machine has this name and so much free memory."""
    rank = torch.distributed.get_rank()
    config = tiny(num_layers=4, pp=len(hosts), params_dtype="fp32", offload_states="all", global_batch_size=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: hosts[rank])
        patch.setattr(host_budget, "available_host_bytes", lambda: free_bytes[rank])
        return settle(config, build_mesh(config, rank, len(hosts)), CPU)


def test_only_ranks_of_one_node_share_its_memory() -> None:
    config = tiny(num_layers=4, pp=4, params_dtype="fp32", offload_states="all", global_batch_size=8)
    states = [state_bytes(config, 4, stage) for stage in range(4)]
    found = run_ranks(4, _settled, ["a", "b", "a", "b"], [100 * GIB, 50 * GIB, 80 * GIB, 60 * GIB])
    for stages, free_bytes in (((0, 2), 80 * GIB), ((1, 3), 50 * GIB)):
        most = int(0.9 * (free_bytes - sum(states[stage].device for stage in stages)))
        spare = (most - sum(states[stage].host for stage in stages)) // 2
        assert [found[stage].granted_bytes for stage in stages] == [states[stage].host + spare for stage in stages]
        assert sum(found[stage].granted_bytes for stage in stages) <= most


def test_a_simulated_rank_has_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_budget, "available_host_bytes", lambda: 100 * GIB)
    config = with_simulated_axes(tiny(num_layers=4, simulate_world="dp=2", params_dtype="fp32", offload_states="all"))
    init_distributed(CPU, config.parallel)
    try:
        found = settle(config, build_mesh(config, 0, 2), CPU)
    finally:
        shutdown()
    assert found.granted_bytes == int(0.9 * (100 * GIB - state_bytes(config, 2, 0).device))
