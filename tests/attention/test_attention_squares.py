"""Attention by torch's operations equals a dense softmax, with caps and without, whatever the size of its squares."""

import pytest
import torch
from torch import Tensor

from memo.attention import squares
from memo.attention.backends import Saved
from memo.attention.select import choose_backend, select_backend
from memo.errors import ConfigError

torch.set_num_threads(1)
SCALE = 0.25
CAP = 0.7
"""Scores of random inputs are near 1: tanh bends most of them."""


def dense(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, softcap: float) -> list[Tensor]:
    """out, lse, dq, dk and dv in fp64, with the whole matrix of scores."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * SCALE
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).bool().triu(1), -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


@pytest.mark.parametrize("softcap", [0.0, CAP])
@pytest.mark.parametrize(("causal", "keys"), [(True, 150), (False, 90)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 3e-6), (torch.bfloat16, 6e-3)])
def test_equals_a_dense_softmax(
    softcap: float, causal: bool, keys: int, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the largest element; in bf16 one rounding of the results, 2^-8, and one of the output in backward."""
    monkeypatch.setattr(squares, "square_tokens", lambda heads: 64)  # three ranges of queries, and rests
    torch.manual_seed(0)
    q, grad = (torch.randn(2, 4, 150, 16, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, keys, 2, 16, dtype=dtype).transpose(1, 2) for _ in range(2))  # strided, as in a run
    backend = select_backend("torch", "cpu", softcap=softcap)
    out, lse = backend.forward(q, k, v, causal, SCALE, place := torch.empty_like(q))
    assert out is place
    found = [out, lse, *backend.backward(grad, Saved(q, k, v, out, lse), causal, SCALE)]
    for ours, true in zip(found, dense(q, k, v, grad, causal, softcap), strict=True):
        assert (ours.double() - true).abs().max() < bound * true.abs().max()


def test_capped_scores_choose_kernels_that_cap() -> None:
    assert choose_backend("auto", "cpu", 16, capped=True).name == "torch"
    with pytest.raises(
        ConfigError, match="attention_backend is 'cpu', which cannot cap scores; use torch or flash_attn"
    ):
        select_backend("cpu", "cpu", softcap=CAP)
