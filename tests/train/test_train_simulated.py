"""--simulate-world: one rank of a larger job alone has the shapes and the memory of that rank."""

from typing import Any

import pytest
import torch
from ranks import run_ranks

import memo
from memo.config import RunConfig
from memo.config.simulated_world import run_world_size, with_simulated_axes
from memo.errors import ConfigError

RUN = {
    "mock_data": True,
    "seq_length": 64,
    "vocab_size": 100,
    "device": "cpu",
    "num_layers": 4,
    "offload_alpha": 0.5,
    "offload_tiles": 2,
    "global_batch_size": 4,
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
    "ZeRO-3": ("dp=2", ZERO3),
    "ZeRO-3, states in host memory": ("dp=2", {**ZERO3, "offload_states": "all"}),
    "ZeRO-3, half of them": ("dp=2", {**ZERO3, "offload_states": "all", "optimizer_offload_fraction": 0.5}),
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"simulate_world": "8"}, "--simulate-world '8' names no axes"),
        ({"simulate_world": "tp=2,tp=4"}, "'tp=2,tp=4' names no axes"),
        ({"simulate_world": "tp=0"}, "'tp=0' names no axes"),
        ({"simulate_world": "tp=4", "tp": 2}, "--tp is 2, but --simulate-world tp=4 has tp=4"),
        ({"simulate_world": "tp=4", "simulate_rank": 4}, "--simulate-rank 4 is not among the 4 ranks"),
    ],
)
def test_what_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_world_size(with_simulated_axes(RunConfig().override(values)).parallel)
    assert message in str(error.value)


def test_a_started_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="runs one rank alone, but 2 processes were started"):
        run_world_size(RunConfig().override({"simulate_world": "tp=2"}).parallel)
