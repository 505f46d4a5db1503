"""--gradient-accumulation-order breadth_first: losses, norms and states are those of depth first, to the last bit."""

from typing import Any

import pytest
import torch
from layouts import global_pieces, make, tiny
from ranks import run_ranks
from torch import Tensor

from memo.config import RunConfig
from memo.train.parallel_model import ParallelModel

STEPS = 3
SWAP: dict[str, Any] = {"offload_alpha": 0.5, "offload_tiles": 2, "offload_check_races": True}
STREAM: dict[str, Any] = {"offload_states": "all", "offload_check_races": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "swapping": SWAP,
    "recomputing": {"recompute_granularity": "full"},
    "streaming": STREAM,
    "streaming and swapping": {**SWAP, **STREAM},
}


def train(config: RunConfig, world_size: int = 1) -> tuple[list[tuple[float, float]], dict[str, Tensor], ParallelModel]:
    model, feed = make(config, world_size)
    told = []
    for _ in range(STEPS):
        loss, norm, _ = model.train_step(feed.next_global_batch(), lr=1e-2)
        told.append((loss.item(), norm))
    return told, global_pieces(model, "master"), model


def both_orders(config: RunConfig, world_size: int = 1) -> bool:
    """Whether all bits are equal; pieces of other ranks are NaN in both."""
    torch.set_num_threads(1)
    expected, masters, _ = train(config, world_size)
    found, others, _ = train(config.override({"gradient_accumulation_order": "breadth_first"}), world_size)
    bits = [value.nan_to_num(7e7).equal(others[name].nan_to_num(7e7)) for name, value in masters.items()]
    return found == expected and all(bits)


IN_FULL = {"swapping", "streaming"}
"""The last way has both."""


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.full] * (way in IN_FULL)) for way in WAYS])
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])  # ranks below run in fp32
def test_orders_agree(way: str, dtype: str) -> None:
    assert both_orders(tiny("llama-tiny", dtype, num_layers=3, **WAYS[way]))


@pytest.mark.parametrize("way", ["plain", "streaming and swapping"])
def test_a_tied_embedding_sums_its_gradients_in_another_order(way: str) -> None:
    """fp64; both orders round, and AdamW divides by roots of tiny moments: 1e-9, far below a lost gradient."""
    told = []
    for order in ("depth_first", "breadth_first"):
        config = tiny("gpt-tiny", "fp64", num_layers=3, gradient_accumulation_order=order, **WAYS[way])
        told.append(train(config)[0])
    for expected, found in zip(*told, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel_sharding_strategy": "optim_grads_params"},
        *(pytest.param({axis: 2}, marks=pytest.mark.full) for axis in ("tp", "cp")),
    ],
)
def test_orders_agree_on_two_ranks(layout: dict[str, Any]) -> None:
    config = tiny("llama-tiny", "fp32", num_layers=3, **layout, **STREAM)
    assert all(run_ranks(2, both_orders, config, 2))


def test_states_are_fetched_once_a_step() -> None:
    """Three layers in two slots: 0, 1, 2 forward, and in backward 0 again. Depth first fetches in each microbatch."""
    config = tiny("llama-tiny", "fp32", num_layers=3, **STREAM)
    depth = make(config, 1)[0].states
    breadth = make(config.override({"gradient_accumulation_order": "breadth_first"}), 1)[0].states
    assert depth is not None and breadth is not None
    assert breadth.plan.num_fetches == 4
    assert depth.plan.num_fetches > 4 * 4
