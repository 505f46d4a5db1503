"""Sinks: a logit per head in the softmax, on whole sequences and in parts; tests/parity has transformers' own."""

from unittest.mock import patch

import pytest
import torch
from attention_reference import Documents, dense_attention, make_inputs, random_documents
from torch import Tensor

from memo.attention import sinks as module
from memo.attention.backends import CpuFlash
from memo.attention.sinks import Sinks
from memo.parallel.context import ContextAttention

S, SCALE = 48, 0.25
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def some_sinks(heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Some far below the scores, some far above."""
    return torch.linspace(-6.0, 6.0, heads, dtype=torch.float64).to(dtype)


def run(inputs: list[Tensor], sinks: Tensor, documents: Documents | None, window: int | None) -> list[Tensor]:
    """out, dq, dk, dv and the gradient of the sinks, under autograd."""
    attention = ContextAttention(CpuFlash(), S, "p2p", None, None, SCALE, window=window)
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], sinks)]
    out = attention(leaves[0], leaves[1], leaves[2], documents, leaves[3])
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


@pytest.mark.parametrize("documents", [None, random_documents(S, 2, 1)], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [None, 7])
def test_fp64_equals_a_softmax_with_one_more_score(documents: Documents | None, window: int | None) -> None:
    inputs, sinks = make_inputs(S, 2, (4, 2), 16, torch.float64), some_sinks(4)
    out, dq, dk, dv, _, of_sinks = dense_attention(inputs, documents, SCALE, window, sinks)
    for ours, true in zip(run(inputs, sinks, documents, window), (out, dq, dk, dv, of_sinks), strict=True):
        torch.testing.assert_close(ours, true, atol=1e-12 * max(1.0, true.abs().max().item()), rtol=0)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_narrow_dtypes_are_off_by_roundings(dtype: torch.dtype) -> None:
    inputs, sinks = make_inputs(S, 2, (4, 2), 16, dtype), some_sinks(4, dtype)
    truth = dense_attention(inputs, None, SCALE, None, sinks)
    for ours, true in zip(run(inputs, sinks, None, None), (*truth[:4], truth[5]), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - true).abs().max() <= 4 * torch.finfo(dtype).eps * true.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_tokens_join_alike(dtype: torch.dtype) -> None:
    """To roundings: a CPU's sigmoid has other last bits in vectors, and the gradient is summed in another order."""
    q, k, v, grad_out = make_inputs(S, 2, (4, 2), 16, dtype)
    attention = ContextAttention(CpuFlash(), S, "p2p", None, None, SCALE)
    results = []
    for most in (4096, 10, 1):
        sinks = Sinks(some_sinks(4, dtype), torch.zeros(4, dtype=torch.float64))
        with patch.object(module, "SINK_TOKENS", most):
            out, lse = attention.forward(q, k, v, sinks=sinks)
            attention.backward(grad_out, q, k, v, out, lse, None, sinks)
        assert sinks.gradient is not None
        results.append((out, lse, sinks.gradient))
    eps = torch.finfo(dtype).eps
    for found in results[1:]:
        for part, whole in zip(found, results[0], strict=True):
            torch.testing.assert_close(part, whole, rtol=8 * eps, atol=8 * eps * float(whole.abs().max()))


def test_a_sink_far_below_all_scores_changes_nothing() -> None:
    inputs = make_inputs(S, 2, (4, 2), 16, torch.float64)
    attention = ContextAttention(CpuFlash(), S, "p2p", None, None, SCALE)
    with_sinks = attention.forward(*inputs[:3], sinks=Sinks(torch.full((4,), -1e4, dtype=torch.float64)))
    for ours, plain in zip(with_sinks, attention.forward(*inputs[:3]), strict=True):
        assert torch.equal(ours, plain)
