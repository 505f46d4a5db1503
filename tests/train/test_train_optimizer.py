"""The sharded optimizer against torch's AdamW on whole weights, and its clipping, skipping and rounding."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from layouts import assemble, global_pieces, make, one_step_backward, tiny
from ranks import run_ranks
from torch import Tensor

from memo.config import RunConfig

torch.set_num_threads(1)

STEPS = 4
RATES = [1e-2, 7e-3, 3e-3, 1e-3]


class Run(NamedTuple):
    gradients: list[dict[str, Tensor]]  # as reduced, before clipping
    weights: list[dict[str, Tensor]]  # before the first step, then after each
    norms: list[float]


def copy_of(pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in pieces.items()}


def _record(config: RunConfig, world_size: int) -> Run:
    model, feed = make(config, world_size)
    run = Run([], [copy_of(global_pieces(model, "master"))], [])
    for lr in RATES:
        one_step_backward(model, feed)
        run.gradients.append(copy_of(global_pieces(model, "grad")))
        norm, updated = model.optimizer.step(lr)
        assert updated
        run.norms.append(norm)
        run.weights.append(copy_of(global_pieces(model, "master")))
    return run


NARROW: dict[str, object] = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@pytest.mark.parametrize(
    ("world_size", "layout", "clip_grad"),
    [
        (2, {}, 0.0),
        (4, {"tp": 2}, 0.5),
        (2, NARROW, 0.5),
        pytest.param(4, {"tp": 2}, 0.0, marks=pytest.mark.full),
        pytest.param(4, {"tp": 2, **NARROW}, 0.0, marks=pytest.mark.full),
    ],
    ids=["dp2", "tp2-dp2-clipped", "dp2-bf16-moments-clipped", "tp2-dp2", "tp2-dp2-bf16-moments"],
)
def test_sharded_adamw_equals_torch_on_whole_weights(
    world_size: int, layout: dict[str, object], clip_grad: float
) -> None:
    """fp64, 1e-12 relative: weights, decay of matrices alone, and the clipping of torch; and that moments in bf16 are
    those of torch, rounded after each step."""
    config = tiny("gpt2-tiny", clip_grad=clip_grad, weight_decay=0.3, **layout)
    results = run_ranks(world_size, _record, config, world_size)
    gradients = [assemble([r.gradients[i] for r in results]) for i in range(STEPS)]
    weights = [assemble([r.weights[i] for r in results]) for i in range(STEPS + 1)]
    whole = {name: torch.nn.Parameter(value.clone()) for name, value in weights[0].items()}
    groups = [
        {"params": [p for p in whole.values() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in whole.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    training = config.training
    adam = torch.optim.AdamW(groups, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_eps)
    for step, lr in enumerate(RATES):
        for name, parameter in whole.items():
            parameter.grad = gradients[step][name].clone()
        if clip_grad:
            norm = torch.nn.utils.clip_grad_norm_(whole.values(), clip_grad)
            assert norm > clip_grad  # or clipping is not tested
            assert results[0].norms[step] == pytest.approx(norm.item(), rel=1e-12)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        if training.exp_avg_dtype == "bf16":
            for state in adam.state.values():
                for kind in ("exp_avg", "exp_avg_sq"):
                    state[kind].copy_(state[kind].bfloat16())
        for name, parameter in whole.items():
            torch.testing.assert_close(weights[step + 1][name], parameter.detach(), rtol=1e-12, atol=1e-12)


def test_clipping_begins_just_above_the_bound() -> None:
    """A norm that equals the bound changes no bit of the gradients; one a thousandth above it is brought down to it."""
    for above, clips in ((1.0, False), (1.001, True)):
        model, feed = make(tiny(), 1)
        one_step_backward(model, feed)
        bound = model.data_parallel.main_gradients.norm().item() / above
        model.optimizer.config = replace(model.optimizer.config, clip_grad=bound)
        before = copy_of(global_pieces(model, "grad"))
        model.optimizer.step(1e-3)
        after = global_pieces(model, "grad")
        assert model.data_parallel.main_gradients.norm().item() == pytest.approx(bound, rel=1e-5)
        assert all(torch.equal(before[name], after[name]) for name in before) is not clips


def _bf16(world_size: int) -> bool:
    model, feed = make(tiny("llama-tiny", "bf16"), world_size)
    for _ in range(3):
        one_step_backward(model, feed)
        model.optimizer.step(1e-3)
        for bucket in model.data_parallel.buckets:
            assert bucket.weights.dtype == torch.bfloat16
            assert bucket.master.dtype == bucket.gradients.dtype == torch.float32
            assert torch.equal(bucket.weights[bucket.mine], bucket.master.bfloat16())
    states = [kinds for _, kinds in model.optimizer.segment_states()]
    assert all(value.dtype == torch.float32 for kinds in states for value in kinds.values())
    finer = any(not torch.equal(b.master, b.master.bfloat16().float()) for b in model.data_parallel.buckets)
    weights = torch.cat([b.weights for b in model.data_parallel.buckets])
    everywhere = [torch.empty_like(weights) for _ in range(world_size)]
    torch.distributed.all_gather(everywhere, weights)
    assert all(torch.equal(weights, other) for other in everywhere)
    return finer


def test_bf16_weights_are_the_rounded_fp32_masters_and_the_same_on_all_replicas() -> None:
    assert all(run_ranks(2, _bf16, 2))  # masters hold more than bf16 can


def test_a_rank_whose_shard_is_all_padding_still_steps() -> None:
    """A bucket for each parameter: of every norm the second rank holds nothing but padding."""
    config = tiny(num_layers=1, hidden_size=8, num_attention_heads=2, kv_channels=4, ddp_bucket_size=1)
    results = run_ranks(2, _record, config, 2)
    weights = [assemble([r.weights[i] for r in results]) for i in (0, STEPS)]
    assert all(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
