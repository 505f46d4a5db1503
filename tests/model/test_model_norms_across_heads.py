"""Norms of all heads of q, and of k, together: whichever ranks have the heads, and in every layout, as one process.

In fp64 to 1e-9 and in fp32 to 1e-4 of the largest value; tests/parity holds one process to transformers.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import Outcome, global_pieces, relative_error, tiny, train_all
from ranks import run_ranks
from torch import Tensor

from memo import Trainer
from memo.config import RunConfig
from memo.parallel.split_norm import split_norms

torch.set_num_threads(1)

TOKENS, WIDTHS, EPSILON = (6, 2), (32, 16), 1e-3
Made = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Of each norm the output, and the gradients of input and weight."""


def draw() -> tuple[list[Tensor], ...]:
    """Inputs, weights and gradients of the outputs, fp64; of one token the input is 0."""
    generator = torch.Generator().manual_seed(3)
    x, grads = ([torch.randn(*TOKENS, w, generator=generator, dtype=torch.float64) for w in WIDTHS] for _ in range(2))
    for each in x:
        each[0, 0] = 0.0
    return x, [1 + 0.3 * torch.randn(w, generator=generator, dtype=torch.float64) for w in WIDTHS], grads


def on_rank(size: int, dtype: torch.dtype) -> Made:
    """This rank's part of each; inputs are parts of one tensor, as q and k are of qkv."""
    x, weights, grads = ([each.chunk(size, -1)[dist.get_rank()].to(dtype) for each in some] for some in draw())
    x = list(torch.cat(x, -1).split([each.shape[-1] for each in x], -1))
    for each in (*x, *weights):
        each.requires_grad_()
    made = split_norms(x, weights, EPSILON, dist.group.WORLD)
    found = torch.autograd.grad(made, [*x, *weights], grads)
    return [each.detach() for each in made], list(found[:2]), list(found[2:])


def whole(dtype: torch.dtype) -> Made:
    x, weights, grads = ([each.to(dtype) for each in some] for some in draw())
    for each in (*x, *weights):
        each.requires_grad_()
    made = [F.rms_norm(each, weight.shape, weight, EPSILON) for each, weight in zip(x, weights, strict=True)]
    found = torch.autograd.grad(made, [*x, *weights], grads)
    return made, list(found[:2]), list(found[2:])


@pytest.mark.parametrize("size", [2, 4])
def test_a_norm_over_ranks_is_that_of_the_whole_width(size: int) -> None:
    """Output, input gradient and weight gradient: fp64 to 1e-12; bf16 at most twice as wrong as torch's own."""
    truth, narrow = whole(torch.float64), whole(torch.bfloat16)
    for dtype in (torch.float64, torch.bfloat16):
        ranks = run_ranks(size, on_rank, size, dtype)
        for kind in range(3):
            for i, true in enumerate(truth[kind]):
                found = torch.cat([rank[kind][i] for rank in ranks], -1)
                assert found.dtype == dtype
                allowed = 1e-12 * true.norm() if dtype == torch.float64 else 2 * (narrow[kind][i] - true).norm()
                assert (found - true).norm() <= allowed, (dtype, kind, i)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "cp2 ring": (2, {"cp": 2, "cp_comm_type": "p2p"}),
    "cp2 gathered": (2, {"cp": 2, "cp_comm_type": "all_gather"}),
    "cp2 all-to-all": (2, {"cp": 2, "cp_comm_type": "a2a"}),
    "pp2": (2, {"pp": 2}),
    "dp2 ZeRO-3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "tp2 cp2": (4, {"tp": 2, "cp": 2, "cp_comm_type": "p2p"}),
}
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4}


def config(dtype: str, **layout: Any) -> RunConfig:
    return tiny("olmo-3-tiny", dtype, window_size=11, **layout)


@functools.cache
def alone() -> dict[str, Outcome]:
    return dict(zip(BOUNDS, train_all([config(dtype) for dtype in BOUNDS]), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_one_process(name: str) -> None:
    """Losses, gradients of the first step, and weights after three, whose steps are of lr, as Adam's are."""
    world_size, layout = LAYOUTS[name]
    found = train_all([config(dtype, **layout) for dtype in BOUNDS], world_size)
    for (dtype, bound), outcome in zip(BOUNDS.items(), found, strict=True):
        expected = alone()[dtype]
        assert outcome.losses == pytest.approx(expected.losses, rel=bound)
        assert relative_error(outcome.gradients, expected.gradients) < bound
        if dtype == "fp64":
            assert relative_error(outcome.weights, expected.weights) < bound


def resumed(folder: Path) -> bool:
    """Whether a run that stops and goes on ends with the weights of one that does not, on this rank of tp 2; what moves
    is decided by measuring."""
    flags: dict[str, Any] = {
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "train_iters": 4,
        "tp": 2,
        "offload_alpha": "auto",
        "offload_tiles": 4,
    }
    flags |= {"progress": False, "num_threads": 1, "log_interval": 100, "global_batch_size": 1, "num_layers": 3}
    base = config("fp32", **flags, profile_cache="off")
    with Trainer(config=base) as trainer:
        trainer.train()
        expected = global_pieces(trainer.parts, "master")
    with Trainer(config=base.override({"save": str(folder), "train_iters": 2})) as trainer:
        trainer.train()
    with Trainer(config=base.override({"load": str(folder)})) as trainer:
        assert trainer.iteration == 2
        trainer.train()
        found = global_pieces(trainer.parts, "master")
    return all(torch.equal(found[name].nan_to_num(), value.nan_to_num()) for name, value in expected.items())


def test_a_run_that_resumes_has_the_same_bits(tmp_path: Path) -> None:
    assert run_ranks(2, resumed, tmp_path) == [True, True]
