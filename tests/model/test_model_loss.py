"""Norm and chunked linear cross-entropy on one rank: values, gradients, padding and memory.

Legend: s tokens, b batch, h hidden, v rows of the vocabulary matrix, of which VOCAB are real.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo.model.norm import Norm
from memo.parallel.loss import LossSettings, linear_cross_entropy, token_losses
from memo_kernels import select_ops

torch.set_num_threads(1)

S, B, H, V, VOCAB = 12, 2, 16, 64, 50


EPSILON = 1e-5


def make_inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    """hidden [s, b, h], weight [v, h], weight and bias of the norm [h], labels [s, b], weights of the losses [s, b]."""
    generator = torch.Generator().manual_seed(5)
    hidden, rows = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((S, B, H), (V, H)))
    of_norm = torch.randn(2, H, generator=generator, dtype=torch.float64)
    weight = rows.to(dtype)
    weight[VOCAB:] = 100.0  # padding: must not be seen
    labels = torch.randint(0, VOCAB, (S, B), generator=generator)
    labels[0] = torch.tensor([0, VOCAB - 1])
    of_losses = torch.rand(S, B, generator=generator, dtype=torch.float64)
    of_losses[4:8] = 0.0  # whole chunks without answers
    return [hidden.to(dtype), weight, *(scale * of_norm).to(dtype), labels, of_losses]


def chunked(inputs: list[Tensor], chunk_size: int, centered: bool = True) -> list[Tensor]:
    """losses, d hidden, d weight, d norm's weight and, for a centered norm, d its bias of ours."""
    *leaves, labels, of_losses = (x.clone() for x in inputs)
    hidden, weight, scale, bias = (nn.Parameter(x) for x in leaves)
    of_losses = of_losses.double()
    norm = Norm(scale, bias if centered else None, EPSILON, select_ops("torch", hidden.dtype))
    sizes = {"vocab_size": VOCAB, "chunk_size": chunk_size}
    settings = LossSettings(norm, group=None, **sizes)
    losses = token_losses(hidden, weight, labels, settings)
    total = linear_cross_entropy(hidden, weight, labels, settings, of_losses)
    assert total.isnan()  # backward computes it
    gradients = torch.autograd.grad(total, (hidden, weight, *norm.parameters()))
    torch.testing.assert_close(total.detach(), (losses * of_losses).sum(), rtol=1e-12, atol=0, check_dtype=False)
    return [losses, *gradients]


def plain(inputs: list[Tensor], dtype: torch.dtype, centered: bool = True) -> list[Tensor]:
    """The same of torch in a dtype: all logits at once, softmax in fp32 or fp64."""
    *leaves, labels, of_losses = inputs
    hidden, weight, *of_norm = (x.to(dtype).requires_grad_() for x in leaves)
    if centered:
        normed = F.layer_norm(hidden, (H,), *of_norm, EPSILON)
    else:
        del of_norm[1:]
        normed = F.rms_norm(hidden, (H,), *of_norm, EPSILON)
    logits = F.linear(normed, weight[:VOCAB]).flatten(0, 1)
    logits = logits.float() if dtype == torch.bfloat16 else logits
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
    return [losses.detach(), *torch.autograd.grad((losses * of_losses).sum(), (hidden, weight, *of_norm))]


def error(got: Tensor, true: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return ((got.double() - true).abs().max() / true.abs().max()).item()


@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 8, 23, 24, 1000])
def test_equals_torch_in_fp64(chunk_size: int, centered: bool) -> None:
    """fp64, 1e-12, for chunks that divide the 24 tokens, that do not, and one longer than all of them."""
    inputs = make_inputs()
    for got, true in zip(chunked(inputs, chunk_size, centered), plain(inputs, torch.float64, centered), strict=True):
        assert got.dtype == torch.float64 and got.shape == true.shape
        assert error(got, true) < 1e-12


@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [5, 1000])
def test_low_precision_is_as_accurate_as_torch(dtype: torch.dtype, chunk_size: int, centered: bool) -> None:
    """fp32 and bf16: losses in fp32; each result at most twice as far from fp64 as torch's."""
    inputs = make_inputs(dtype)
    true = plain(inputs, torch.float64, centered)
    ours, theirs = chunked(inputs, chunk_size, centered), plain(inputs, dtype, centered)
    assert [x.dtype for x in ours] == [torch.float32, *[dtype] * (len(ours) - 1)]
    for got, other, exact in zip(ours, theirs, true, strict=True):
        assert error(got, exact) <= 2 * error(other, exact) + torch.finfo(got.dtype).eps / 2


def test_gradients_of_weights_keep_their_bits_over_many_chunks() -> None:
    """bf16, 512 chunks that all add to one row, and to the norm: as accurate as torch's one product, which a sum in
    bf16 is not. Torch's own norm adds in bf16; ours is off by no more than three roundings."""
    generator = torch.Generator().manual_seed(6)
    hidden = torch.rand(512, B, H, generator=generator).to(torch.bfloat16)
    rows = torch.randn(V, H, generator=generator).mul(0.01).to(torch.bfloat16)
    of_norm = torch.ones(2, H, dtype=torch.bfloat16)
    inputs = [hidden, rows, *of_norm, torch.zeros(512, B, dtype=torch.int64), torch.ones(512, B)]
    exact, torchs = plain(inputs, torch.float64), plain(inputs, torch.bfloat16)
    _, _, grad_weight, *grads_of_norm = chunked(inputs, B)
    assert error(grad_weight, exact[2]) <= 2 * error(torchs[2], exact[2])
    for got, true in zip(grads_of_norm, exact[3:], strict=True):
        assert error(got, true) <= 3 * torch.finfo(torch.bfloat16).eps


def test_hidden_states_become_their_gradient() -> None:
    """The same memory, so nothing else of their size is made; who would read them again is told so."""
    hidden, weight, scale, bias, labels, of_losses = make_inputs()
    norm = Norm(nn.Parameter(scale), nn.Parameter(bias), EPSILON, select_ops("torch", hidden.dtype))
    leaf = hidden.clone().requires_grad_()
    x = leaf * 1.0
    kept = x.exp()  # autograd keeps its result, and of the next product x
    squares = x * x
    sizes = {"vocab_size": VOCAB, "chunk_size": 5}
    settings = LossSettings(norm, group=None, **sizes)
    loss = linear_cross_entropy(x, weight.requires_grad_(), labels, settings, of_losses)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert grad.data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()
    kept.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, hidden.exp())


def test_huge_logits_stay_finite() -> None:
    """fp32, logits of some thousands: exp of them would overflow."""
    inputs = make_inputs(torch.float32, scale=1000.0)  # of the norm
    true = plain(inputs, torch.float64)
    assert true[0].max() > 1000.0
    for got, exact in zip(chunked(inputs, 8), true, strict=True):
        assert error(got, exact) < 1e-5


class Made(TorchDispatchMode):
    """The most bytes of what operations returned that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._storages |= {StorageWeakRef(storage): storage.nbytes() for storage in storages}
        self._storages = {ref: n for ref, n in self._storages.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._storages.values()))
        return out


@pytest.mark.parametrize(("dtype", "logit_bytes"), [(torch.float32, 4), (torch.bfloat16, 2 + 4)], ids=str)
def test_logits_of_two_chunks_never_meet(dtype: torch.dtype, logit_bytes: int) -> None:
    """Nor is there a tensor of all logits: forward and backward over four chunks of 256 tokens x 512 rows take at most
    one chunk's logits, of narrow ones with their wide copy, and a quarter more for the matrix's gradient and tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 1, 4, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(512, 4, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 512, (1024, 1), generator=generator)
    with Made() as made:
        sizes = {"vocab_size": 512, "chunk_size": 256}
        settings = LossSettings(nn.Identity(), group=None, **sizes)
        linear_cross_entropy(hidden, weight, labels, settings, torch.ones(1024, 1).double()).backward()
    assert 1.0 <= made.peak_bytes / (256 * 512 * logit_bytes) < 1.25
