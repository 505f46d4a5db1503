"""Attention through flash and cuDNN, whole and packed, forward and backward, against the formula in fp64.

The bound: at most twice as wrong, in the root of the sum of squares, as the
formula in bf16, step by step.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from memo.emulated_gpu.face import EmulatedGpu

BATCH, HEADS, TOKENS, DIM = 2, 4, 96, 32


def inputs(heads: int = HEADS) -> list[Tensor]:
    """q, k, v and the output's gradient, [b, n, s, d] in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, n, TOKENS, DIM) for n in (HEADS, heads, heads, HEADS)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def formula(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> list[Tensor]:
    """Output and gradients, each step of them in `dtype`; heads of keys and values serve several queries."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
    keys, values = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) * DIM**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def assert_near(found: list[Tensor], exact: list[Tensor], rough: list[Tensor]) -> None:
    for one, right, plain in zip(found, exact, rough, strict=True):
        wrong, allowed = ((tensor.double().cpu() - right).norm() for tensor in (one, plain))
        assert 0 < wrong <= 2 * allowed


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH])
def test_through_torchs_own_function(any_schedule: EmulatedGpu, backend: SDPBackend, causal: bool) -> None:
    q, k, v, grad = inputs()
    leaves = [tensor.cuda().requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        gradients = torch.autograd.grad(out, leaves, grad.cuda())
    exact, rough = (formula(dtype, q, k, v, grad, causal) for dtype in (torch.float64, torch.bfloat16))
    assert_near([out.detach(), *gradients], exact, rough)


@pytest.mark.parametrize("heads", [HEADS, HEADS // 2])
def test_packed_documents(any_schedule: EmulatedGpu, heads: int) -> None:
    """[t, n, d] with boundaries, an empty document among them, and fewer heads of keys and values."""
    lengths = [40, 0, 56]
    starts = torch.tensor([0, 40, 40, 96], dtype=torch.int32, device="cuda")
    q, k, v, grad = (tensor[0].transpose(0, 1).contiguous() for tensor in inputs(heads))
    options = (starts, starts, max(lengths), max(lengths), 0.0, True)
    on_device = [tensor.cuda() for tensor in (q, k, v)]
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(*on_device, *options, False)
    gradients = torch.ops.aten._flash_attention_backward(grad.cuda(), *on_device, out, lse, *options, state, unused)
    assert_near([out, *gradients], *(by_document(dtype, q, k, v, grad) for dtype in (torch.float64, torch.bfloat16)))


def by_document(dtype: torch.dtype, *packed: Tensor) -> list[Tensor]:
    """The formula on each of the two documents that are not empty."""
    parts = []
    for begin, end in ((0, 40), (40, 96)):
        rows = [tensor[begin:end].transpose(0, 1).unsqueeze(0) for tensor in packed]
        parts.append([tensor.squeeze(0).transpose(0, 1) for tensor in formula(dtype, *rows, causal=True)])
    return [torch.cat(both) for both in zip(*parts, strict=True)]
