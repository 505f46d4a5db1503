"""--simulate-world: one rank of a larger job alone has the shapes and the memory of that rank."""

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
        held = records[-1].weights_bytes, records[-1].optimizer_bytes, records[-1].rounding_buffers_bytes
        finite = all(torch.isfinite(bucket.weights).all() for bucket in parts.data_parallel.buckets)
        return shapes, parts.swap.plan, held, records[-1].host_records_bytes, finite, trainer.state.optimizer_steps


@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}, {"pp": 2}])
def test_a_simulated_rank_has_what_the_real_one_has(axes: dict[str, int]) -> None:
    real = run_ranks(2, facts, **axes)
    for rank, expected in enumerate(real):
        text = ",".join(f"{axis}={size}" for axis, size in axes.items())
        assert facts(simulate_world=text, simulate_rank=rank) == expected
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
