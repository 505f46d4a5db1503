"""Dense attention as a reference.

The truth in fp64, and torch's own SDPA in a given dtype for scale of error.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

Documents = tuple[tuple[int, ...], ...]


def make_inputs(
    seq_length: int, batch: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    """q, k, v, grad_out as [s, b, heads, d]; ``heads`` is (query heads, key/value heads)."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv = heads
    shapes = [(seq_length, batch, n, head_dim) for n in (num_heads, num_kv, num_kv, num_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def visible(seq_length: int, documents: Documents | None, batch: int, window: int | None = None) -> Tensor:
    """bool [b, 1, s, s]: causal, inside one document, and at most `window` tokens, the query included."""
    rows = documents or ((0, seq_length),) * batch
    ids = torch.stack([torch.bucketize(torch.arange(seq_length), torch.tensor(row[1:]), right=True) for row in rows])
    same = ids[:, :, None] == ids[:, None, :]
    back = torch.arange(seq_length)[:, None] - torch.arange(seq_length)
    return (same & (back >= 0) & (back < (window or seq_length))).unsqueeze(1)


def dense_attention(
    inputs: list[Tensor],
    documents: Documents | None,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """out, dq, dk, dv in fp64 from a materialised softmax, on [s, b, heads, d]; then lse [b, n, s].

    With `sinks` [n] each head's scores are one more, without a value; the gradient of these comes last.
    """
    q, k, v, grad_out = [x.double().permute(1, 2, 0, 3) for x in inputs]
    q, k, v = [x.detach().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    scores = scores.masked_fill(~visible(q.shape[2], documents, q.shape[0], window), -torch.inf)
    values = v.repeat_interleave(group, 1)
    if sinks is not None:
        sinks = sinks.double().detach().requires_grad_()
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    out = scores.softmax(-1) @ values
    grads = torch.autograd.grad(out, (q, k, v, *(() if sinks is None else (sinks,))), grad_out)
    whole = [x.permute(2, 0, 1, 3) for x in (out.detach(), *grads[:3])]
    return [*whole, scores.detach().logsumexp(-1), *grads[3:]]


def torch_attention(
    inputs: list[Tensor], documents: Documents | None, scale: float, window: int | None = None
) -> list[Tensor]:
    """Return out, dq, dk, dv from torch's SDPA in the inputs' dtype: their error is that of the dtype, without memo."""
    q, k, v, grad_out = [x.permute(1, 2, 0, 3) for x in inputs]
    q, k, v = [x.detach().requires_grad_() for x in (q, k, v)]
    is_whole = documents is None and window is None
    mask = None if is_whole else visible(q.shape[2], documents, q.shape[0], window)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    return [x.permute(2, 0, 1, 3) for x in (out.detach(), *grads)]


def random_documents(seq_length: int, batch: int, seed: int) -> Documents:
    """Different documents in every row, among them some of length 1."""
    rng = random.Random(seed)
    rows = []
    for _ in range(batch):
        inner = set(rng.sample(range(1, seq_length), 5))
        inner |= {start + 1 for start in list(inner)[:2] if start + 1 < seq_length}
        rows.append((0, *sorted(inner), seq_length))
    return tuple(rows)


def assert_accurate(
    got: list[Tensor], inputs: list[Tensor], documents: Documents | None, scale: float, window: int | None = None
) -> None:
    """out, dq, dk, dv.

    Within 1e-12 of the truth in fp64; else at most twice torch's own error, which differs from CPU to CPU, plus half an
    ulp. Parts are merged in fp32: there every one of up to eight adds half an ulp.
    """
    truth = dense_attention(inputs, documents, scale, window)
    dtype = inputs[0].dtype
    theirs = torch_attention(inputs, documents, scale, window)
    for name, ours, other, true in zip(("out", "dq", "dk", "dv"), got, theirs, truth, strict=False):
        assert ours.dtype == dtype and ours.shape == true.shape, name
        size = true.abs().max().item()
        error = (ours.double() - true).abs().max().item()
        if dtype == torch.float64:
            bound = 1e-12 * max(1.0, size)
        else:
            ulps = 4.0 if dtype == torch.float32 else 0.5
            bound = 2 * (other.double() - true).abs().max().item() + ulps * torch.finfo(dtype).eps * size
        assert error <= bound, f"{name} in {dtype}: error {error:.2e} above {bound:.2e}"
