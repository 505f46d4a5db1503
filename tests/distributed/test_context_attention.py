"""Context-parallel attention equals dense attention on the whole sequence: out and gradients, every type."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_reference import (
    Documents,
    assert_accurate,
    dense_attention,
    make_inputs,
    random_documents,
)
from ranks import run_ranks
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.attention.backends import CpuFlash, Saved
from memo.attention.blocks import Chunk, ScoreBlock, Scores, attention_blocks
from memo.attention.core import attend
from memo.attention.select import select_backend
from memo.errors import ConfigError
from memo.parallel import collectives
from memo.parallel.collectives import exchange
from memo.parallel.context import ContextAttention
from memo.parallel.zigzag import natural_from_zigzag, token_indices, zigzag_chunks, zigzag_from_natural

S = 64
SCALE = 0.25
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Chunks at cp 4 are 8 tokens long: documents end on their edges, one off, and in single tokens.
EDGES: Documents = ((0, 8, 16, 17, 40, 56, S), (0, 1, 2, 31, 32, 33, 63, S))
TYPES = {
    2: [("p2p", 1), ("all_gather", 1), ("a2a", 2)],
    4: [("p2p", 1), ("all_gather", 1), ("a2a", 4), ("a2a+p2p", 2), ("a2a+p2p", 1), ("a2a+p2p", 4)],
}
ONE_OF_BOTH = (("a2a+p2p", 1), ("a2a+p2p", 4))
"""Of four ranks; what p2p and a2a do, by another name."""


def groups(a2a_size: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """(ring, a2a) groups over the whole world: rank = j * a2a_size + i."""
    size = dist.get_world_size()
    a2a, _ = dist.new_subgroups_by_enumeration([list(range(j, j + a2a_size)) for j in range(0, size, a2a_size)])
    ring, _ = dist.new_subgroups_by_enumeration([list(range(i, size, a2a_size)) for i in range(a2a_size)])
    return ring, a2a


def run_local(attention: ContextAttention, inputs: list[Tensor], documents: Documents | None) -> list[Tensor]:
    """This rank's out, dq, dk, dv through autograd, from the whole sequence's inputs."""
    own = token_indices(S, dist.get_world_size(), dist.get_rank())
    q, k, v, grad_out = [x[own].clone() for x in inputs]
    q, k, v = [x.requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, documents)
    out.backward(grad_out)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def assemble(local: list[Tensor]) -> list[Tensor]:
    """The whole sequence's tensors from every rank's."""
    size = dist.get_world_size()
    order = torch.cat([token_indices(S, size, rank) for rank in range(size)]).argsort()
    whole = []
    for x in local:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous())
        whole.append(torch.cat(parts)[order])
    return whole


def check_type(comm_type: str, a2a_size: int) -> int:
    """All ranks have the same whole tensors, so each judges its share of the cases; returns their number."""
    ring, a2a = groups(a2a_size)
    cases = 0
    some = (EDGES, torch.float32), (random_documents(S, 2, 2), torch.bfloat16)
    # Windows of three tokens, of less and of more than a chunk, beside none.
    windows = (((4, 4), None), ((8, 4), None), ((4, 4), 3), ((8, 4), 7), ((4, 4), 23))
    for documents, dtype in (*product((None, EDGES, random_documents(S, 2, 1)), DTYPES[:1]), *some):
        for heads, window in windows if dtype == torch.float64 else windows[1::2]:
            attention = ContextAttention(CpuFlash(), S, comm_type, ring, a2a, SCALE, window=window)
            inputs = make_inputs(S, 2, heads, 16, dtype, seed=cases)
            whole = assemble(run_local(attention, inputs, documents))
            if cases % dist.get_world_size() == dist.get_rank():
                assert_accurate(whole, inputs, documents, SCALE, window)
            cases += 1
    return cases


@pytest.mark.parametrize(
    ("cp_size", "comm_type", "a2a_size"),
    [
        pytest.param(cp_size, *case, marks=[pytest.mark.full] if case in ONE_OF_BOTH else [])
        for cp_size, cases in TYPES.items()
        for case in cases
    ],
)
def test_equals_dense_attention(cp_size: int, comm_type: str, a2a_size: int) -> None:
    assert run_ranks(cp_size, check_type, comm_type, a2a_size) == [19] * cp_size


def check_single_key_head_and_odd_head_dim() -> None:
    ring, _ = groups(1)
    inputs = make_inputs(S, 1, (3, 1), 5, torch.float64)
    for comm_type in ("p2p", "all_gather"):
        attention = ContextAttention(CpuFlash(), S, comm_type, ring, None, SCALE)
        for documents in (None, EDGES[:1]):
            whole = assemble(run_local(attention, inputs, documents))
            assert_accurate(whole, inputs, documents, SCALE)


def test_single_key_head_and_odd_head_dim() -> None:
    run_ranks(2, check_single_key_head_and_odd_head_dim)


class CountingBackend(CpuFlash):
    """Counts how often each direction of the kernel runs."""

    def __init__(self) -> None:
        self.num_forward = self.num_backward = 0

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.num_forward += 1
        return super().forward(*args)

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        self.num_backward += 1
        return super().backward(grad_out, saved, causal, scale)


def check_explicit_calls(comm_type: str, a2a_size: int) -> tuple[int, int]:
    """forward and backward by hand on strided inputs and copies of out and lse, as an executor holds them."""
    ring, a2a = groups(a2a_size)
    backend = CountingBackend()
    attention = ContextAttention(backend, S, comm_type, ring, a2a, SCALE)
    inputs = make_inputs(S, 2, (4, 4), 16, torch.float64)
    expected = run_local(attention, inputs, EDGES)
    own = token_indices(S, dist.get_world_size(), dist.get_rank())
    qkv = torch.cat([x[own] for x in inputs[:3]], dim=-1)  # fused projection: q, k, v are strided views of it
    q, k, v = qkv.split(16, dim=-1)
    out, lse = attention.forward(q, k, v, EDGES)
    assert lse.numel() == math.prod(q.shape[:3])
    saved_out, saved_lse = out.clone(), lse.clone()
    before = backend.num_forward, backend.num_backward
    got = [
        saved_out,
        *attention.backward(inputs[3][own], q, k, v, saved_out, saved_lse, EDGES),
    ]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    return backend.num_forward - before[0], backend.num_backward - before[1]


def check_placed(comm_type: str, a2a_size: int) -> None:
    """A NaN-filled buffer of tokens with other values between them gets the bits that a fresh tensor gets."""
    ring, a2a = groups(a2a_size)
    attention = ContextAttention(CpuFlash(), S, comm_type, ring, a2a, SCALE)
    own = token_indices(S, dist.get_world_size(), dist.get_rank())
    for dtype in DTYPES:
        for documents in (None, EDGES):
            q, k, v = (x[own] for x in make_inputs(S, 2, (4, 4), 16, dtype)[:3])
            expected, expected_lse = attention.forward(q, k, v, documents)
            place = torch.full((*q.shape[:2], 80), torch.nan, dtype=dtype)[..., :64].unflatten(-1, (4, 16))
            out, lse = attention.forward(q, k, v, documents, place)
            assert out.data_ptr() == place.data_ptr()
            assert torch.equal(place, expected) and torch.equal(lse, expected_lse)


def check_ring_traffic() -> tuple[list[torch.dtype], list[torch.dtype]]:
    """Dtypes of this rank's messages in forward and in backward, for bf16 inputs."""
    sent: list[torch.dtype] = []

    def recording(
        sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: ProcessGroup
    ) -> list[dist.Work]:
        sent.extend(x.dtype for x, _ in sends)
        return exchange(sends, receives, group)

    collectives.exchange = recording
    ring, _ = groups(1)
    attention = ContextAttention(CpuFlash(), S, "p2p", ring, None, SCALE)
    own = token_indices(S, dist.get_world_size(), dist.get_rank())
    q, k, v, grad_out = (x[own] for x in make_inputs(S, 2, (4, 2), 16, torch.bfloat16))
    out, lse = attention.forward(q, k, v)
    forward = sent[:]
    attention.backward(grad_out, q, k, v, out, lse)
    return forward, sent[len(forward) :]


def test_ring_sends_kv_once_round_and_gradients_in_fp32_one_hop_more() -> None:
    for forward, backward in run_ranks(4, check_ring_traffic):
        assert forward == [torch.bfloat16] * 3
        assert backward == [torch.bfloat16, torch.float32] * 3 + [torch.float32]


def check_sinks(comm_type: str, a2a_size: int) -> None:
    """Windows and documents; the gradient of the sinks is summed over ranks, as that of any parameter."""
    ring, a2a = groups(a2a_size)
    own = token_indices(S, dist.get_world_size(), dist.get_rank())
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for documents, window in ((None, None), (EDGES, None), (None, 7), (EDGES, 23)):
        attention = ContextAttention(CpuFlash(), S, comm_type, ring, a2a, SCALE, window=window)
        inputs = make_inputs(S, 2, (8, 4), 16, torch.float64)
        *qkv, grad_out = (x[own].clone() for x in inputs)
        leaves = [x.requires_grad_() for x in (*qkv, sinks.clone())]
        out = attention(leaves[0], leaves[1], leaves[2], documents, leaves[3])
        *grads, of_sinks = torch.autograd.grad(out, leaves, grad_out)
        dist.all_reduce(of_sinks)
        truth = dense_attention(inputs, documents, SCALE, window, sinks)
        found = [*assemble([out.detach(), *grads]), of_sinks]
        for ours, true in zip(found, (*truth[:4], truth[5]), strict=True):
            torch.testing.assert_close(ours, true, atol=1e-12 * max(1.0, true.abs().max().item()), rtol=0)


def check_calls(comm_type: str, a2a_size: int) -> tuple[int, int]:
    check_placed(comm_type, a2a_size)
    check_sinks(comm_type, a2a_size)
    return check_explicit_calls(comm_type, a2a_size)


@pytest.mark.parametrize(("comm_type", "a2a_size"), [("p2p", 1), ("all_gather", 1), ("a2a", 4), ("a2a+p2p", 2)])
def test_calls_are_those_of_an_executor(comm_type: str, a2a_size: int) -> None:
    """The output is written where it belongs, sinks join the softmax of the whole sequence, and an explicit backward
    never runs the forward."""
    for num_forward, num_backward in run_ranks(4, check_calls, comm_type, a2a_size):
        assert num_forward == 0 and num_backward > 0


def test_one_rank_is_local_attention() -> None:
    inputs = make_inputs(S, 2, (4, 2), 16, torch.bfloat16)
    attention = ContextAttention(select_backend("auto", "cpu"), S, "p2p", None, None, SCALE)
    scores = attention_blocks((Chunk(0, S, 0),), (Chunk(0, S, 0),), None)
    assert scores == Scores((ScoreBlock(None, 0, S, 0, S, True),))  # one call of the kernel, no merging, no copies
    out, lse = attention.forward(*inputs[:3])
    local_out, local_lse = attend(CpuFlash(), *inputs[:3], scores, SCALE)
    assert torch.equal(out, local_out) and torch.equal(lse, local_lse)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_zigzag_layout(size: int) -> None:
    shards = [token_indices(48, size, rank) for rank in range(size)]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(48))
    assert torch.equal(natural_from_zigzag(torch.cat(shards), size), torch.arange(48))
    assert torch.equal(zigzag_from_natural(torch.arange(48), size), torch.cat(shards))
    # The same share of the causal triangle on every rank.
    work = [int((shard + 1).sum()) for shard in shards]
    assert len(set(work)) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiles_of_a_sweep_are_shared_by_all_ranks(size: int) -> None:
    """Each rank's part of a tile is its zigzag shard of that tile alone."""
    tiles = [token_indices(48, size, rank, parts=3).view(3, -1) for rank in range(size)]
    for index in range(3):
        tile = torch.arange(16 * index, 16 * (index + 1))
        assert torch.equal(natural_from_zigzag(torch.cat([own[index] for own in tiles]), size), tile)
        assert all(
            torch.equal(own[index] - 16 * index, token_indices(16, size, rank)) for rank, own in enumerate(tiles)
        )
    assert torch.equal(token_indices(48, size, 0, parts=1), token_indices(48, size, 0))


@pytest.mark.parametrize(("ring_size", "a2a_size"), [(2, 2), (1, 4), (3, 2), (2, 3)])
def test_a2a_groups_hold_a_zigzag_shard_of_the_ring(ring_size: int, a2a_size: int) -> None:
    size = ring_size * a2a_size
    for j in range(ring_size):
        members = [token_indices(48, size, j * a2a_size + i) for i in range(a2a_size)]
        assert torch.equal(natural_from_zigzag(torch.cat(members), a2a_size), token_indices(48, ring_size, j))


def test_clear_errors() -> None:
    with pytest.raises(ConfigError, match=r"seq_length is 36 and context_parallel_size 8.*multiple of 16"):
        zigzag_chunks(36, 8, 0)
    with pytest.raises(ConfigError, match="'ring'; known are p2p, all_gather, a2a"):
        ContextAttention(CpuFlash(), S, "ring", None, None, SCALE)
    attention = ContextAttention(CpuFlash(), S, "p2p", None, None, SCALE)
    q, k, v, _ = make_inputs(S, 2, (4, 2), 16, torch.float64)
    with pytest.raises(ValueError, match="q has 32 tokens on each of 1 ranks, but seq_length is 64"):
        attention(q[:32], k[:32], v[:32])
    with pytest.raises(ValueError, match=r"documents has 1 rows .*\(0, 32\).*batch has 2 rows of 64"):
        attention(q, k, v, ((0, 32),))


def check_group_errors() -> None:
    ring, a2a = groups(2)
    whole, _ = groups(1)
    with pytest.raises(ConfigError, match="'p2p', but the ring group has 1 ranks and the a2a group 2"):
        ContextAttention(CpuFlash(), S, "p2p", ring, a2a, SCALE)
    with pytest.raises(ConfigError, match="'a2a', but the ring group has 2 ranks and the a2a group 1"):
        ContextAttention(CpuFlash(), S, "a2a", whole, None, SCALE)
    attention = ContextAttention(CpuFlash(), S, "a2a", None, a2a, SCALE)
    q, k, v, _ = make_inputs(S // 2, 1, (4, 1), 16, torch.float64)
    with pytest.raises(ConfigError, match="a2a group of 2 ranks cannot split 4 query heads and 1 key/value"):
        attention(q, k, v)


def test_clear_errors_about_groups() -> None:
    run_ranks(2, check_group_errors)
