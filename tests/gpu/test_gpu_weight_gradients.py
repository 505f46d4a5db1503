"""Weight gradients on a GPU are added to the fp32 main gradient in the product, and are not rounded before.

Bound: 1e-5 of the largest gradient from fp64, on the same factors in bf16. Gradients that are rounded to bf16 before
they are added miss it by 100 times as much.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memo.model.norm import Norm
from memo.parallel.embedding import VocabParallelEmbedding
from memo.parallel.hidden import in_one_section
from memo.parallel.loss import LossSettings, linear_cross_entropy
from memo.parallel.shards import Shard, ShardedParameter
from memo.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from memo.parallel.weight_gradients import add_weight_gradient
from memo_kernels import select_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OUT, IN, TOKENS, MICROBATCHES = 64, 48, 96, 8
FAR, ROUNDED = 1e-5, 100


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Owned:
    """A weight [out, in] with a main gradient, whose owner counts what backwards have added."""

    def __init__(self) -> None:
        self.weight, self.told = ShardedParameter(bf16(OUT, IN), Shard(())), 0
        self.main = self.weight.main_grad = torch.zeros(OUT, IN, device="cuda")
        self.weight.on_added = self._count

    def _count(self, weight: ShardedParameter) -> None:
        assert weight is self.weight
        self.told += 1


def far(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact).abs().max() / exact.abs().max())


def products() -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Gradients of outputs and inputs of each microbatch, and the sum of their products: in fp64, and rounded each."""
    torch.manual_seed(0)
    factors = [(bf16(TOKENS, 1, OUT), bf16(TOKENS, 1, IN)) for _ in range(MICROBATCHES)]
    exact, rounded = torch.zeros(OUT, IN, dtype=torch.float64), torch.zeros(OUT, IN)
    for grad, x in factors:
        left, right = grad[:, 0].cpu().t(), x[:, 0].cpu()
        exact += left.double() @ right.double()
        rounded += left @ right
    return factors, exact, rounded


def test_a_sum_of_products_is_not_rounded() -> None:
    factors, exact, rounded = products()
    main = torch.zeros(OUT, IN, device="cuda")
    for grad, x in factors:
        add_weight_gradient(main, grad[:, 0], x[:, 0])
    assert far(main, exact) < FAR and far(rounded, exact) > ROUNDED * far(main, exact)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("recomputed", [False, True])
def test_matrices_add_to_the_main_gradient(
    kind: Callable[..., ColumnParallelLinear | RowParallelLinear], recomputed: bool
) -> None:
    """Under autograd, and where torch.utils.checkpoint gives the backward copies of what the forward saved."""
    factors, exact, rounded = products()
    owned = Owned()
    linear = kind(owned.weight, None, None)
    for grad, x in factors:
        x = x.clone().requires_grad_()
        y = checkpoint(linear, x, use_reentrant=False) if recomputed else linear(x)
        y.backward(grad)
        assert x.grad is not None and owned.weight.grad is None
        assert torch.equal(x.grad, grad @ owned.weight.detach())
    assert owned.told == MICROBATCHES
    assert far(owned.main, exact) < FAR and far(rounded, exact) > ROUNDED * far(owned.main, exact)


def test_fp32_adds_in_the_product_as_well() -> None:
    factors, exact, _ = products()
    main = torch.zeros(OUT, IN, device="cuda")
    weight = ShardedParameter(torch.zeros(OUT, IN, device="cuda"), Shard(()))
    weight.main_grad, weight.on_added = main, lambda weight: None
    for grad, x in factors:
        RowParallelLinear(weight, None, None)(x.float().requires_grad_()).backward(grad.float())
    assert weight.grad is None and far(main, exact) < FAR


def test_the_loss_adds_its_chunks_to_the_main_gradient() -> None:
    """What it adds is what it gives autograd for a weight without a main gradient, but for that one's roundings."""
    torch.manual_seed(0)
    hidden, labels = bf16(TOKENS, 1, IN), torch.randint(0, OUT, (TOKENS, 1), device="cuda")
    weights = torch.rand(TOKENS, 1, device="cuda", dtype=torch.float64)
    owned = Owned()
    plain = nn.Parameter(owned.weight.detach().clone())
    for table in (owned.weight, plain):
        norm = Norm(nn.Parameter(torch.ones(IN, device="cuda", dtype=torch.bfloat16)), None, 1e-5, OPS)
        sizes = {"vocab_size": OUT, "chunk_size": 20, "group": None}
        x = hidden.clone().requires_grad_()
        linear_cross_entropy(x, table, labels, LossSettings(norm, **sizes), weights).backward()
    assert plain.grad is not None and owned.weight.grad is None and owned.told == 1
    assert 0 < far(owned.main, plain.grad.double().cpu()) < 2 * torch.finfo(torch.bfloat16).eps


OPS = select_ops("torch", torch.bfloat16)


def test_the_embedding_adds_its_chunks_to_the_main_gradient() -> None:
    """Section by section, as under a swap plan, and with tp: rows of the table met once are exact in bf16."""
    torch.manual_seed(0)
    tokens = torch.randperm(OUT, device="cuda")[:40].view(40, 1)
    owned, grad = Owned(), bf16(40, 1, IN)
    embedding = VocabParallelEmbedding(owned.weight, None)
    for _ in range(2):
        embedding.in_sections(tokens, None, None, in_one_section(40)).backward(grad)
    expected = torch.zeros(OUT, IN, device="cuda")
    expected[tokens[:, 0]] = 2 * grad[:, 0].float()
    assert torch.equal(owned.main, expected) and owned.weight.grad is None and owned.told == 2


def test_a_weight_without_a_main_gradient_gets_its_gradient_from_autograd() -> None:
    factors, exact, _ = products()
    weight = nn.Parameter(bf16(OUT, IN))
    for grad, x in factors:
        ColumnParallelLinear(weight, None, None)(x.requires_grad_()).backward(grad)
    assert weight.grad is not None and far(weight.grad, exact) < 8 * torch.finfo(torch.bfloat16).eps
