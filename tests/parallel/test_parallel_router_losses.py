"""Losses of routers and the load of experts are the same in every layout: to 1e-12 in fp64, and loads exactly.

Gradients of the losses are held against transformers in tests/parity, where they are no small part of the router's, and
a resumed run in tests/train.
"""

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from layouts import assemble, global_pieces, make, one_step_backward, relative_error, tiny
from ranks import run_ranks
from torch import Tensor

from memo.model.layer import Experts

LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}
DENSE_FIRST = {"num_layers": 4, "moe_layer_freq": "[0]+[1]*3", "moe_ffn_hidden_size": 32}
Found = tuple[dict[str, Tensor], list[float], list[list[int]]]
"""Gradients of the second of two steps of the same weights, and of that step the figures and the load."""


def second_step(flags: dict[str, Any], world_size: int) -> Found:
    model, feed = make(tiny("qwen3-moe-tiny", **{**DENSE_FIRST, **LOSSES, **flags}), world_size)
    for _ in range(2):
        one_step_backward(model, feed)
    assert model.router_losses is not None
    gradients = global_pieces(model, "grad")
    return gradients, model.router_losses.figures().tolist(), model.router_losses.state()


@functools.cache
def one_process() -> Found:
    return second_step({}, 1)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, {"gradient_accumulation_order": "breadth_first", "offload_alpha": 0.0, "offload_tiles": 4}),
        (1, {"offload_alpha": 0.0, "offload_tiles": 8, "offload_granularity": "tile", "offload_slot_tiles": 2}),
        (2, {"tp": 2, "offload_alpha": 0.5, "offload_tiles": 2}),
        (4, {"cp": 2, "data_parallel_sharding_strategy": "optim_grads_params"}),
        (4, {"tp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_every_layout_has_the_losses_of_one_process(world_size: int, flags: dict[str, Any]) -> None:
    ranks = run_ranks(world_size, second_step, flags, world_size) if world_size > 1 else [second_step(flags, 1)]
    expected, figures, load = one_process()
    assert relative_error(assemble([gradients for gradients, _, _ in ranks]), expected) <= 1e-12
    for _, found, loads in ranks:
        assert found == pytest.approx(figures, rel=1e-12) and loads == load


BIASED = {"num_layers": 4, "moe_router_bias_update_rate": 0.01, "moe_ffn_hidden_size": 16}


def two_steps(flags: dict[str, Any], world_size: int) -> tuple[dict[str, Tensor], list[list[float]], list[Any]]:
    """Gradients of the last of three steps; biases after each, and the loads by which they moved."""
    model, feed = make(tiny("glm-4.5-tiny", **{**BIASED, **flags}), world_size)
    losses = model.router_losses
    assert losses is not None and losses.biases is not None
    biases, loads = [losses.biases.clone()], []
    for _ in range(2):
        model.train_step(feed.next_global_batch(), lr=1e-3)
        biases.append(losses.biases.clone())
        loads.append(losses.load.clone())
    with model.rehearsing():
        model.train_step(feed.next_global_batch(), lr=1e-3)
    assert torch.equal(losses.biases, biases[-1])
    one_step_backward(model, feed)
    return global_pieces(model, "grad"), torch.stack(biases).tolist(), torch.stack(loads).tolist()


@functools.cache
def two_steps_of_one_process() -> tuple[dict[str, Tensor], list[list[float]], list[Any]]:
    return two_steps({}, 1)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, {"tp": 2}),
        (4, {"cp": 2, "data_parallel_sharding_strategy": "optim_grads_params"}),
        (4, {"pp": 2, "offload_states": "all"}),
    ],
    ids=str,
)
def test_biases_follow_the_load_alike_in_every_layout(world_size: int, flags: dict[str, Any]) -> None:
    """Biases and loads exactly, on every rank; gradients of the step after to 1e-9 in fp64, as weights are."""
    expected, biases, loads = two_steps_of_one_process()
    ranks = run_ranks(world_size, two_steps, flags, world_size)
    for _, found, of_rank in ranks:
        assert found == biases and of_rank == loads
    assert relative_error(assemble([gradients for gradients, _, _ in ranks]), expected) <= 1e-9


def test_experts_with_fewer_tokens_than_the_mean_get_a_higher_bias() -> None:
    _, biases, loads = two_steps_of_one_process()
    before, after = torch.tensor(biases[:-1]), torch.tensor(biases[1:])
    load = torch.tensor(loads)
    expected = before + 0.01 * (load.mean(-1, keepdim=True) - load).sign()
    torch.testing.assert_close(after, expected, atol=1e-8, rtol=0)
    assert before[0].abs().max() == 0 and (after[-1].abs() > 0.019).any()


def test_figures_are_of_the_choices_and_scores_of_a_step() -> None:
    """The imbalance by counting, the losses by their formulas from the scores of each router."""
    scores: list[Tensor] = []
    original = Experts.route

    def noted(self: Experts, x: Tensor) -> Tensor:
        scores.append(x.flatten(0, -2) @ self.router.weight.t())
        return original(self, x)

    with patch.object(Experts, "route", noted):
        _, (imbalance, balance, z_loss), loads = second_step({"micro_batch_size": 4}, 1)
    layers, top_k = torch.stack(scores[-3:]).detach(), 2
    assert layers.shape[:2] == (3, 4 * 64)
    chosen = torch.zeros_like(layers).scatter_(2, layers.topk(top_k).indices, 1.0).sum(1)
    assert loads == chosen.long().tolist()
    share = chosen / (top_k * layers.shape[1])
    balances = layers.shape[2] * (share * layers.softmax(-1).mean(1)).sum(-1)
    found = [share.max() * layers.shape[2], balances.mean(), layers.logsumexp(-1).square().mean()]
    assert [imbalance, balance, z_loss] == pytest.approx([float(value) for value in found], rel=1e-12)
