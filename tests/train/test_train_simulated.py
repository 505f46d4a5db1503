"""--simulate-world: one rank of a larger job alone has the shapes and the memory of that rank."""

from typing import Any

import pytest
import torch
from ranks import run_ranks

import memo

RUN = {
    "mock_data": True,
    "seq_length": 64,
    "vocab_size": 100,
    "device": "cpu",
    "num_layers": 4,
    "offload_alpha": 0.5,
    "offload_tiles": 2,
    "global_batch_size": 2,
    "max_step_minutes": 600.0,
    "num_threads": 1,
}


def facts(**run: object) -> tuple[object, ...]:
    """Shapes of the weights, the swap plan, bytes on both sides, and whether two steps updated the weights."""
    with memo.Trainer("gpt-tiny", **RUN, **run) as trainer:  # type: ignore[arg-type]
        records = [trainer.step() for _ in range(2)]
        parts = trainer.parts
        assert parts.swap is not None
        shapes = {name: tuple(p.shape) for name, p in parts.data_parallel.parameters.items()}
        names = ("weights", "gradients", "optimizer", "rounding_buffers", "host_records")
        held = [getattr(records[-1], f"{name}_bytes") for name in names]
        finite = all(torch.isfinite(segment.weight).all() for segment in parts.optimizer.segments)
        return shapes, parts.swap.plan, held, finite, trainer.state.optimizer_steps


ZERO3: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params", "params_dtype": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("tp=2", {"tp": 2}),
    "cp": ("cp=2", {"cp": 2}),
    "pp": ("pp=2", {"pp": 2}),
    "ZeRO-3, half on the host": (
        "dp=2",
        {**ZERO3, "offload_states": "all", "optimizer_offload_fraction": 0.5},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_rank_has_what_the_real_one_has(name: str) -> None:
    world, flags = CASES[name]
    for rank, expected in enumerate(run_ranks(2, facts, **flags)):
        assert facts(simulate_world=world, simulate_rank=rank, **flags) == expected
        assert expected[-2:] == (True, 2)


def test_four_axes_in_one_process() -> None:
    found = facts(simulate_world="tp=2,cp=2,pp=2,dp=2", simulate_rank=11, tp=2)
    assert found[-2:] == (True, 2)
