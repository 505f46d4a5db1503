"""What attention's backward asks torch's allocator for: of cuDNN as emulated, of flash by torch's own host code."""

import pytest
import torch

from memo.attention.backends import AttentionBackend, Saved
from memo.attention.select import select_backend
from memo.emulated_gpu.face import EmulatedGpu
from memo.spec.attention_workspace import AttentionCall, backward_workspace, squares_bytes

MOST_BESIDE_BYTES = 64
"""The seeds of dropout, which nothing reads."""


def call_of(queries: int, keys: int, kv_heads: int, head_dim: int) -> AttentionCall:
    return AttentionCall(1, queries, keys, 4, kv_heads, head_dim, element_bytes=2)


def requested_bytes(backend: AttentionBackend, call: AttentionCall) -> tuple[int, int]:
    """(the most that the backward asks for at once beside its results, what is left of that when it returns)."""
    heads, kv_heads, shape = call.heads, call.kv_heads, (call.batch, -1, call.head_dim)
    sizes = ((heads, call.queries), (kv_heads, call.keys), (kv_heads, call.keys))
    q, k, v = (torch.zeros((*shape[:1], s, n, *shape[2:]), dtype=torch.bfloat16, device="cuda") for n, s in sizes)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = call.queries == call.keys
    out, lse = backend.forward(q, k, v, causal, 1.0)
    grad = torch.zeros_like(out)
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    results = backend.backward(grad, Saved(q, k, v, out, lse), causal, 1.0)
    stats, own = torch.cuda.memory_stats(), sum(x.nbytes for x in results)
    return stats["requested_bytes.all.peak"] - before - own, stats["requested_bytes.all.current"] - before - own


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@pytest.mark.parametrize(
    "call", [call_of(384, 384, 4, 64), call_of(384, 384, 2, 64), call_of(100, 300, 2, 64), call_of(100, 300, 4, 40)]
)
def test_the_workspace_is_asked_for_and_given_back(gpu: EmulatedGpu, name: str, call: AttentionCall) -> None:
    most, left = requested_bytes(select_backend(name, "cuda"), call)
    assert 0 <= most - sum(backward_workspace(name, call).values()) <= MOST_BESIDE_BYTES
    assert left == 0


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("call", [call_of(3000, 3000, 2, 64), call_of(5000, 5000, 4, 64), call_of(900, 3300, 2, 64)])
def test_squares_take_at_most_what_the_account_says(gpu: EmulatedGpu, call: AttentionCall, softcap: float) -> None:
    """And at least 97 % of it."""
    most, left = requested_bytes(select_backend("torch", "cuda", softcap=softcap), call)
    account = squares_bytes(call, 4, on_cuda=True, causal=call.queries == call.keys, backward=True)
    assert 0.97 * account <= most <= account
    assert left == 0
