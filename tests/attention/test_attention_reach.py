"""No attention kernel is given a tensor whose last element 32 bits do not reach (memo.spec.reach).

At full size on tensors without memory, whose calls are only looked at; with a short reach in numbers, fp64 to 1e-12.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_reference import dense_attention, make_inputs
from torch import Tensor

from memo.attention.backends import AttentionBackend, CpuFlash, Saved, VarlenBackend
from memo.attention.blocks import Documents
from memo.config import preset
from memo.parallel.context import ContextAttention
from memo.parallel.context_sweep import backward_rows, forward_rows
from memo.spec import reach

LLAMA = preset("llama-3.1-8b")
HEADS, GROUPS, SIZE = LLAMA.num_attention_heads, LLAMA.kv_heads, LLAMA.head_dim
TOKENS = 1 << 21
TILES = 32
REACHED = 2**31


class Measured(VarlenBackend):
    """Computes nothing; keeps the last offset of each tensor that a kernel would be given or return."""

    name = "measured"

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.scores = 0
        """Of one head, a causal square in full."""

    def see(self, *tensors: Tensor) -> None:
        for x in tensors:
            self.offsets.append(sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out = q.transpose(1, 2).contiguous().transpose(1, 2) if out is None else out
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        self.see(q, k, v, out, lse)
        self.scores += q.shape[2] * k.shape[2]
        return out, lse

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        self.see(grad_out, *saved)
        self.scores += saved.q.shape[2] * saved.k.shape[2]
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in saved[:3])  # type: ignore[return-value]

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q) if out is None else out
        self.see(q, k, v, out)
        self.scores += sum((stop - start) ** 2 for start, stop in pairwise(cu_seqlens))
        return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    def backward_varlen(
        self, grad_out: Tensor, saved: Saved, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.see(grad_out, *saved)
        self.scores += sum((stop - start) ** 2 for start, stop in pairwise(cu_seqlens))
        return torch.empty_like(saved.q), torch.empty_like(saved.k), torch.empty_like(saved.v)


def on_paper(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def swept(backend: AttentionBackend, tokens: int, tiles: int, documents: Documents | None) -> None:
    """One layer as memo.executor.sweep runs it on one GPU: q, k and v of a tile are views of its rows of the slot."""
    attention = ContextAttention(backend, tokens, "p2p", None, None, 1.0)
    store, sums = on_paper(tokens, 1, 2 * GROUPS, SIZE), on_paper(tokens, 1, 2 * GROUPS, SIZE, dtype=torch.float32)
    rows = tokens // tiles
    for stop in range(rows, tokens + 1, rows):
        qkv = on_paper(rows, 1, HEADS + 2 * GROUPS, SIZE).split((HEADS, GROUPS, GROUPS), dim=2)
        out = on_paper(rows, 1, HEADS, SIZE)
        lse = forward_rows(attention, qkv, None, store[:stop], documents, out)
        saved = Saved(qkv[0], *store[:stop].chunk(2, dim=2), out, lse)
        backward_rows(attention, on_paper(rows, 1, HEADS, SIZE), saved, sums[:stop], documents)


def whole(backend: AttentionBackend, tokens: int, documents: Documents | None) -> None:
    """A layer that a slot holds whole."""
    attention = ContextAttention(backend, tokens, "p2p", None, None, 1.0)
    qkv = on_paper(tokens, 1, HEADS + 2 * GROUPS, SIZE).split((HEADS, GROUPS, GROUPS), dim=2)
    out, lse = attention.forward(*qkv, documents)
    attention.backward(on_paper(tokens, 1, HEADS, SIZE), *qkv, out, lse, documents)


SHORT = ((*range(0, TOKENS, 3000), TOKENS),)
LONG = ((0, 900_000, 900_001, TOKENS),)


@pytest.mark.parametrize("documents", [None, SHORT, LONG], ids=["one", "short", "long"])
def test_a_sweep_of_two_million_tokens_on_one_gpu(documents: Documents | None) -> None:
    backend = Measured()
    swept(backend, TOKENS, TILES, documents)
    assert max(backend.offsets) < REACHED < TOKENS * 2 * GROUPS * SIZE, "the store itself reaches further"
    if documents is None:  # all scores are computed, each way
        assert backend.scores == 2 * TOKENS * TOKENS * (TILES + 1) // (2 * TILES)


def test_tiles_that_reach_too_far_themselves() -> None:
    backend = Measured()
    swept(backend, TOKENS, 2, None)
    assert max(backend.offsets) < REACHED


@pytest.mark.parametrize("documents", [None, SHORT, LONG], ids=["one", "short", "long"])
def test_whole_layers_of_two_million_tokens_on_one_gpu(documents: Documents | None) -> None:
    backend = Measured()
    whole(backend, TOKENS, documents)
    assert max(backend.offsets) < REACHED


def test_without_cuts_both_would_reach_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "REACH", 1 << 40)
    for run in (lambda backend: swept(backend, TOKENS, TILES, None), lambda backend: whole(backend, TOKENS, None)):
        backend = Measured()
        run(backend)
        assert max(backend.offsets) > REACHED


def test_what_is_within_reach_is_one_call() -> None:
    """Sequences that fit keep their calls, and so their bits: 256K whole tokens of this model on one GPU."""
    backend = Measured()
    whole(backend, 1 << 18, None)
    assert len(backend.offsets) == 5 + 6


def test_cuts_lie_between_blocks_of_kernels() -> None:
    assert reach.most_tokens(1) == REACHED
    assert reach.most_tokens((HEADS + 2 * GROUPS) * SIZE) == 349_440 == 2730 * 128
    assert reach.most_tokens(REACHED // 5) == 5 and reach.most_tokens(2 * REACHED) == 1


@pytest.fixture(params=[8, 11, 16])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Tokens that a call may take of the inputs below."""
    heads, groups, size, batch = 4, 2, 8, 2
    monkeypatch.setattr(reach, "REACH", request.param * batch * (heads + 2 * groups) * size)
    yield request.param


S = 48
BLOCK_LISTS: list[Documents | None] = [None, ((0, S), (0, S)), ((0, 1, 2, 30, S), (0, 17, S))]


class Largest(CpuFlash):
    """The CPU kernel; keeps the most tokens of a call."""

    def __init__(self) -> None:
        self.tokens = 0

    def forward(self, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        self.tokens = max(self.tokens, q.shape[2], k.shape[2])
        return super().forward(q, k, *rest)

    def backward(self, grad_out: Tensor, saved: Saved, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.tokens = max(self.tokens, saved.q.shape[2], saved.k.shape[2])
        return super().backward(grad_out, saved, *rest)


@pytest.mark.parametrize("documents", BLOCK_LISTS)
def test_cut_attention_equals_dense(documents: Documents | None, most: int) -> None:
    backend, scale, inputs = Largest(), 0.3, make_inputs(S, 2, (4, 2), 8, torch.float64)
    q, k, v, grad_out = inputs
    attention = ContextAttention(backend, S, "p2p", None, None, scale)
    out, lse = attention.forward(q, k, v, documents)
    gradients = attention.backward(grad_out, q, k, v, out, lse, documents)
    assert backend.tokens == most, "nothing was cut"
    for found, right in zip((out, *gradients, lse), dense_attention(inputs, documents, scale), strict=True):
        assert (found - right).abs().max() <= 1e-12 * right.abs().max()
