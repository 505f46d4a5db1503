"""Attention over blocks on one process: merging, packed documents, dtypes, fast path, varlen kernels."""

from itertools import pairwise

import pytest
import torch
from attention_reference import assert_accurate, dense_attention, make_inputs
from torch import Tensor

from memo.attention.backends import CpuFlash, Saved, VarlenBackend, placed
from memo.attention.blocks import Chunk, Documents, ScoreBlock, Scores, attention_blocks
from memo.attention.core import GradSums, OutputMerger, attend, attend_backward
from memo.spec.attention_workspace import MOST_DOCUMENTS

torch.set_num_threads(1)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
S = 48
WHOLE = (Chunk(0, S, 0),)
DOCUMENTS = [None, ((0, S), (0, S)), ((0, 1, 2, 30, S), (0, 17, S)), ((0, 12, 24, S), (0, 12, 24, S))]


class VarlenByLoop(VarlenBackend):
    """The CPU kernel, document by document, behind the interface of a varlen kernel; counts its calls."""

    name = "varlen by loop"

    def __init__(self) -> None:
        self.cpu = CpuFlash()
        self.calls: list[str] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("causal" if causal else "full")
        return self.cpu.forward(q, k, v, causal, scale, out)

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return self.cpu.backward(grad_out, saved, causal, scale)

    def forward_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: tuple[int, ...],
        scale: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert cu_seqlens[0] == 0 and cu_seqlens[-1] == q.shape[0] == k.shape[0]
        self.calls.append("varlen")
        parts = [
            self.cpu.forward(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), True, scale)
            for a, b in pairwise(cu_seqlens)
        ]
        found = torch.cat([part[0].transpose(0, 1) for part, _ in parts])
        return placed(found, out), torch.cat([lse[0] for _, lse in parts], dim=-1)

    def backward_varlen(
        self, grad_out: Tensor, saved: Saved, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = []
        for a, b in pairwise(cu_seqlens):
            dout, q, k, v, out = (x[a:b].transpose(0, 1)[None] for x in (grad_out, *saved[:4]))
            parts.append(self.cpu.backward(dout, Saved(q, k, v, out, saved.lse[None, :, a:b]), True, scale))
        dq, dk, dv = (torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(3))
        return dq, dk, dv


def run(
    backend: CpuFlash | VarlenByLoop,
    inputs: list[Tensor],
    scores: Scores,
    scale: float,
) -> tuple[list[Tensor], Tensor]:
    q, k, v, grad_out = inputs
    out, lse = attend(backend, q, k, v, scores, scale)
    return [out, *attend_backward(backend, grad_out, Saved(q, k, v, out, lse), scores, scale)], lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_packed_or_not_equals_dense(dtype: torch.dtype, documents: Documents | None, heads: tuple[int, int]) -> None:
    inputs = make_inputs(S, 2, heads, 16, dtype)
    got, lse = run(CpuFlash(), inputs, attention_blocks(WHOLE, WHOLE, documents), 0.25)
    assert_accurate(got, inputs, documents, 0.25)
    true_lse = dense_attention(inputs, documents, 0.25)[4]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-3 if lse.dtype != dtype else 1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_many_blocks_merge_to_the_whole(dtype: torch.dtype, documents: Documents | None) -> None:
    # Queries in scrambled chunks against keys in others, so that nearly every query meets several blocks.
    starts, length = [32, 0, 40, 8, 24, 16], 8
    q_chunks = tuple(Chunk(start, length, i * length) for i, start in enumerate(starts))
    k_chunks = tuple(Chunk(start, length, start) for start in range(0, S, length)[::-1])
    order = torch.cat([torch.arange(start, start + length) for start in starts])
    inputs = make_inputs(S, 2, (4, 2), 16, dtype)
    q, k, v, grad_out = inputs
    scores = attention_blocks(q_chunks, k_chunks, documents)
    assert any(not block.causal for block in scores.blocks) and len(scores.blocks) > 6
    got, _ = run(CpuFlash(), [q[order], k, v, grad_out[order]], scores, 0.25)
    got = [x[order.argsort()] if i < 2 else x for i, x in enumerate(got)]
    assert_accurate(got, inputs, documents, 0.25)


class Spy(CpuFlash):
    """Remembers the memory that the kernel was given and gave."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        results = super().forward(q, k, v, causal, scale, out)
        self.addresses = [x.data_ptr() for x in (q, k, v, results[0])]
        return results


def test_one_causal_block_copies_nothing() -> None:
    q, k, v, _ = make_inputs(S, 1, (4, 2), 16, torch.bfloat16)
    spy = Spy()
    out, _ = attend(spy, q, k, v, attention_blocks(WHOLE, WHOLE, None), 0.25)
    assert spy.addresses == [x.data_ptr() for x in (q, k, v, out)]


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_results_have_the_layout_of_those_that_a_caller_makes(documents: Documents | None) -> None:
    """The CPU's kernel puts the batch before the tokens."""
    inputs = make_inputs(S, 2, (4, 2), 16, torch.float32)
    got, lse = run(CpuFlash(), inputs, attention_blocks(WHOLE, WHOLE, documents), 0.25)
    assert all(each.is_contiguous() for each in (*got, lse))


def test_packed_documents_are_bit_equal_to_each_alone() -> None:
    q, k, v, grad_out = make_inputs(S, 1, (4, 2), 16, torch.bfloat16)
    row = (0, 10, 11, 37, S)
    (out, dq, dk, dv), _ = run(CpuFlash(), [q, k, v, grad_out], attention_blocks(WHOLE, WHOLE, (row,)), 0.25)
    for a, b in pairwise(row):
        alone = [x[a:b] for x in (q, k, v, grad_out)]
        expected, _ = run(CpuFlash(), alone, Scores((ScoreBlock(None, 0, b - a, 0, b - a, True),)), 0.25)
        for got, want in zip((out, dq, dk, dv), expected, strict=True):
            assert torch.equal(got[a:b], want)


def test_varlen_kernel_takes_all_documents_of_a_row_in_one_call() -> None:
    documents = ((0, 1, 2, 30, S), (0, 17, S), (0, S))
    inputs = make_inputs(S, 3, (4, 2), 16, torch.float64)
    backend = VarlenByLoop()
    got, _ = run(backend, inputs, attention_blocks(WHOLE, WHOLE, documents), 0.25)
    assert backend.calls == ["varlen", "varlen", "varlen"]
    assert_accurate(got, inputs, documents, 0.25)


def test_a_call_of_a_varlen_kernel_takes_a_limited_number_of_documents() -> None:
    """Of 150 documents 64 in each of two calls and the rest in a third: their bits do not depend on it."""
    documents: Documents = ((*range(150), 160),)
    inputs = make_inputs(160, 1, (4, 2), 16, torch.float32)
    whole = (Chunk(0, 160, 0),)
    backend = VarlenByLoop()
    got, _ = run(backend, inputs, attention_blocks(whole, whole, documents), 0.25)
    assert MOST_DOCUMENTS == 64 and backend.calls == ["varlen", "varlen", "varlen"]
    expected, _ = run(CpuFlash(), inputs, attention_blocks(whole, whole, documents), 0.25)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("q_chunks", "documents", "calls"),
    [
        # Two rows alike, and documents that began before the queries.
        ((Chunk(24, 24, 0),), ((0, 5, 30, 40, S),) * 2, ["full", "varlen", "varlen"]),
        # Rows 0 to 15 hold two ranges whose keys are not neighbours: four documents, two runs.
        ((Chunk(0, 8, 0), Chunk(16, 8, 8)), ((0, 4, 8, 16, 20, S),), ["varlen", "varlen"]),
    ],
    ids=["full blocks", "a gap"],
)
def test_varlen_kernel_of_queries_that_are_a_part(
    q_chunks: tuple[Chunk, ...], documents: Documents, calls: list[str]
) -> None:
    held = torch.cat([torch.arange(chunk.start, chunk.start + chunk.length) for chunk in q_chunks])
    q, k, v, grad_out = inputs = make_inputs(S, len(documents), (4, 2), 16, torch.float64)
    backend = VarlenByLoop()
    scores = attention_blocks(q_chunks, WHOLE, documents)
    (out, dq, _, _), _ = run(backend, [q[held], k, v, grad_out[held]], scores, 0.25)
    assert sorted(backend.calls) == calls
    true_out, true_dq, *_ = dense_attention(inputs, documents, 0.25)
    torch.testing.assert_close(out, true_out[held], atol=1e-12, rtol=0)
    torch.testing.assert_close(dq, true_dq[held], atol=1e-12, rtol=0)


def buffer_like(q: Tensor) -> Tensor:
    """NaN, and with room between the tokens, as in a slot that holds more."""
    s, b, n, d = q.shape
    return torch.full((s, b, n * d + 24), torch.nan, dtype=q.dtype)[..., : n * d].unflatten(-1, (n, d))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("backend", [CpuFlash(), VarlenByLoop()], ids=lambda x: x.name)
@pytest.mark.parametrize("scrambled", [False, True], ids=["squares", "merged"])
def test_output_is_written_where_it_belongs_with_the_same_bits(
    dtype: torch.dtype, documents: Documents | None, backend: CpuFlash | VarlenByLoop, scrambled: bool
) -> None:
    q, k, v, _ = make_inputs(S, 2, (4, 2), 16, dtype)
    q_chunks = (Chunk(20, 28, 0), Chunk(0, 20, 28)) if scrambled else WHOLE
    scores = attention_blocks(q_chunks, WHOLE, documents)
    assert scrambled == any(not block.causal for block in scores.blocks)
    expected, expected_lse = attend(backend, q, k, v, scores, 0.25)
    place = buffer_like(q)
    out, lse = attend(backend, q, k, v, scores, 0.25, place)
    assert out.data_ptr() == place.data_ptr() and out.stride() == place.stride()
    assert torch.equal(place, expected) and torch.equal(lse, expected_lse)


def test_a_wide_output_is_merged_in_its_place_and_a_narrow_one_is_not() -> None:
    """bf16 sums would lose bits: only the finished sum is rounded into the place."""
    for dtype, in_place in ((torch.float32, True), (torch.float64, True), (torch.bfloat16, False)):
        q = make_inputs(S, 1, (2, 2), 16, dtype)[0]
        place = buffer_like(q)
        merger = OutputMerger(q, place)
        assert (merger._out is place) == in_place
        assert merger._out.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)


def test_squares_are_not_merged() -> None:
    """Each document's kernel is told its rows of the output; nothing passes over them again."""

    class Placed(Spy):
        def forward(
            self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            assert out is not None
            places.append(out.data_ptr())
            return super().forward(q, k, v, causal, scale, out)

        def merge_(self, *parts: Tensor) -> None:  # type: ignore[override]
            raise AssertionError("nothing is to be merged")

    places: list[int] = []
    q, k, v, _ = make_inputs(S, 2, (4, 2), 16, torch.bfloat16)
    place = buffer_like(q)
    attend(Placed(), q, k, v, attention_blocks(WHOLE, WHOLE, ((0, 20, S),) * 2), 0.25, place)
    assert places == [place.data_ptr(), place[20].data_ptr()]


def test_sums_over_many_blocks_are_rounded_once() -> None:
    """In bf16 the error of output and gradients over 32 blocks of keys is 1.5 to 1.9 times that of one rounding, for
    the kernel rounds its blocks too; it is above 4 times that where the sums are rounded after each block."""
    backend, scale, width = CpuFlash(), 0.25, 4
    q, k, v, grad_out = make_inputs(128, 1, (4, 4), 16, torch.bfloat16)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("sbnd,tbnd->bnst", exact[0], exact[1]) * scale
    wanted = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), exact[2])
    wanted_grads = torch.autograd.grad(wanted, exact, grad_out.double())
    merger, sums = OutputMerger(q), GradSums(*(torch.zeros(x.shape) for x in (q, k, v)))
    blocks = tuple(ScoreBlock(None, 0, 128, start, start + width, False) for start in range(0, 128, width))
    merger.add(backend, q, k, v, Scores(blocks), scale)
    out, lse = merger.result()
    # dk and dv of a block are added to once, so the queries come in blocks too.
    rows = range(0, 128, width)
    squares = tuple(block._replace(q_start=row, q_stop=row + width) for block in blocks for row in rows)
    sums.add(backend, grad_out, Saved(q, k, v, out, lse), Scores(squares), scale)
    for found, reference in zip((out, *sums), (wanted, *wanted_grads), strict=True):
        once = (reference.bfloat16() - reference).square().mean().sqrt()
        assert (found.bfloat16() - reference).square().mean().sqrt() < 2.5 * once


def test_sums_may_arrive_until_the_first_kernel_has_run() -> None:
    """As those of a ring do, which come from another rank meanwhile."""
    backend, scale = CpuFlash(), 0.25
    q, k, v, grad_out = make_inputs(64, 1, (4, 4), 16, torch.float64)
    scores = Scores((ScoreBlock(None, 0, 64, 0, 64, False),))
    saved = Saved(q, k, v, *attend(backend, q, k, v, scores, scale))
    alone = GradSums.zeros(saved, torch.float64)
    alone.add(backend, grad_out, saved, scores, scale)
    late = GradSums.zeros(saved, torch.float64)
    for missing in (late.dk, late.dv):
        missing.fill_(torch.nan)

    def wait() -> None:
        late.dk.fill_(1.0)
        late.dv.fill_(2.0)

    late.add(backend, grad_out, saved, scores, scale, wait)
    assert torch.equal(late.dq, alone.dq) and torch.equal(late.dk, alone.dk + 1) and torch.equal(late.dv, alone.dv + 2)
