"""Norms of all heads of q, and of k, together, whichever ranks have the heads.

tests/parity holds a model with them to transformers, and tests/distributed layouts to one process.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor

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
