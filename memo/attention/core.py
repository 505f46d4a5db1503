"""Attention over a list of blocks: runs the kernel of each block and merges the results.

Legend: s tokens, b batch, n query heads, n_kv key/value heads, d head dim. Arguments and results have Megatron's layout
[s, b, n, d]; kernels get permuted views [b, n, s, d].

Blocks of the same queries are merged by their log-sum-exps (memo_kernels.merge). Blocks whose tensors exceed 32-bit
indices of a kernel are cut (memo.spec.reach); this does not change the rounding of other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memo.attention.backends import AttentionBackend, Saved, VarlenBackend
from memo.attention.blocks import ScoreBlock, Scores, cut_within, grouped, step_of, strips
from memo.spec.attention_workspace import MOST_DOCUMENTS
from memo.spec.reach import most_tokens
from memo_kernels import wide_dtype


def attend(
    backend: AttentionBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    scale: float,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [s_q, b, n, d], k and v [s_k, b, n_kv, d] -> out [s_q, b, n, d] in q's dtype, lse [b, n, s_q].

    ``scores`` must give every query at least one key. lse is fp32, or fp64 for fp64 inputs. ``out`` and ``lse``, if
    given, are overwritten, and all other memory is freed; the last dim of ``out`` must be contiguous. Results that are
    not given are contiguous, in whatever layout a kernel writes: sums over them, such as the gradients of norms and
    sinks, have the same order as those over tensors that the caller has made.
    """
    scores = cut_within(scores, _most_tokens(q, k, v))
    if lse is None and _is_whole(scores, q, k):
        place, causal = None if out is None else _heads_first(out), scores.blocks[0].causal
        found, lse = backend.forward(_heads_first(q), _heads_first(k), _heads_first(v), causal, scale, place)
        return _tokens_first(found).contiguous() if out is None else out, lse.contiguous()
    if not _are_apart(scores):
        merger = OutputMerger(q, out, lse)
        merger.add(backend, q, k, v, scores, scale)
        return merger.result()
    # Nothing is merged. These squares are no longer than the window, so they are treated as plain documents.
    out = empty_out(q) if out is None else out
    lse = empty_lse(q) if lse is None else lse
    calls = _calls(backend, Scores(scores.blocks), q, k, v)
    q, k, v, whole = map(_heads_first, (q, k, v, out))
    for call in calls:
        _, part = call.forward(backend, call.queries(q), call.keys(k), call.keys(v), scale, call.queries(whole))
        call.queries(lse).copy_(part)
    return out, lse


def empty_out(q: Tensor) -> Tensor:
    """Memory for the output of attention of q [s_q, b, n, d], of the same shape."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def empty_lse(q: Tensor) -> Tensor:
    """Memory for the log-sum-exp of attention of q [s_q, b, n, d]: [b, n, s_q], fp32, or fp64 for fp64 inputs."""
    s_q, b, n, _ = q.shape
    return torch.empty((b, n, s_q), dtype=wide_dtype(q.dtype), device=q.device)


def attend_backward(
    backend: AttentionBackend,
    grad_out: Tensor,
    saved: Saved,
    scores: Scores,
    scale: float,
    grads: GradSums | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attend: grad_out [s_q, b, n, d] and its inputs and results -> dq, dk, dv in q's dtype.

    ``grads``, if given, are zeros of this dtype, which become the gradients; all other memory is freed. Gradients are
    contiguous like the results of attend.
    """
    q, k, v, out, lse = saved
    scores = cut_within(scores, _most_tokens(q, k, v, out, grad_out))
    if grads is None and _is_whole(scores, q, k):
        block_saved = Saved(_heads_first(q), _heads_first(k), _heads_first(v), _heads_first(out), lse)
        dq, dk, dv = backend.backward(_heads_first(grad_out), block_saved, scores.blocks[0].causal, scale)
        return _tokens_first(dq).contiguous(), _tokens_first(dk).contiguous(), _tokens_first(dv).contiguous()
    # Causal squares share no token, so each sum has one term.
    dtype = q.dtype if _are_apart(scores) else wide_dtype(q.dtype)
    sums = GradSums.zeros(saved, dtype) if grads is None or dtype != q.dtype else grads
    sums.add(backend, grad_out, saved, scores, scale)
    if grads is None:
        return sums.dq.to(q.dtype), sums.dk.to(q.dtype), sums.dv.to(q.dtype)
    return grads.dq.copy_(sums.dq), grads.dk.copy_(sums.dk), grads.dv.copy_(sums.dv)


class OutputMerger:
    """Running output and log-sum-exp of queries whose keys are processed block by block.

    The running output is in the wide dtype; it is ``out`` itself if that has this dtype.
    """

    def __init__(self, q: Tensor, out: Tensor | None = None, lse: Tensor | None = None) -> None:
        """For q [s_q, b, n, d]; ``out`` has the same shape, and the results are written to it and to ``lse``."""
        wide = wide_dtype(q.dtype)
        self._dtype, self._place = q.dtype, out
        if out is not None and out.dtype == wide:
            self._out = out.zero_()
        else:
            self._out = torch.zeros(q.shape, dtype=wide, device=q.device)
        self._lse = (empty_lse(q) if lse is None else lse).fill_(-torch.inf)

    def add(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, scores: Scores, scale: float) -> None:
        """Run the blocks of q against one set of keys and values, and merge their results."""
        calls = _calls(backend, scores, q, k, v)
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        total_out = _heads_first(self._out)
        for call in calls:
            out, lse = call.forward(backend, call.queries(q), call.keys(k), call.keys(v), scale)
            backend.merge_(call.queries(total_out), call.queries(self._lse), out, lse)
            del out, lse  # before the next call makes its own

    def result(self) -> tuple[Tensor, Tensor]:
        """out [s_q, b, n, d] in q's dtype and lse [b, n, s_q]."""
        if self._place is None or self._place is self._out:
            return self._out.to(self._dtype), self._lse
        return self._place.copy_(self._out), self._lse


class GradSums(NamedTuple):
    """Running gradients dq [s_q, b, n, d], dk and dv [s_k, b, n_kv, d], added to in place."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def zeros(cls, saved: Saved, dtype: torch.dtype) -> GradSums:
        """Sums that begin with zeros, for q, k and v of ``saved``."""
        return cls(*(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in saved[:3]))

    def add(
        self,
        backend: AttentionBackend,
        grad_out: Tensor,
        saved: Saved,
        scores: Scores,
        scale: float,
        wait: Callable[[], object] | None = None,
    ) -> None:
        """Run the backward of the blocks of q and one set of keys and values; ``saved`` has the global results.

        ``wait`` is called after each kernel, before its results are added: the sums may still arrive until then.
        """
        calls = _calls(backend, scores, *saved[:4], grad_out)
        q, k, v, out, lse = *map(_heads_first, saved[:4]), saved.lse
        grad_out, dq, dk, dv = map(_heads_first, (grad_out, *self))
        for call in calls:
            of_keys = (call.keys(k), call.keys(v))
            part = Saved(call.queries(q), *of_keys, call.queries(out), call.queries(lse))
            dq_part, dk_part, dv_part = call.backward(backend, call.queries(grad_out), part, scale)
            if wait is not None:
                wait()
            call.queries(dq).add_(dq_part)
            call.keys(dk).add_(dk_part)
            call.keys(dv).add_(dv_part)
            del part, dq_part, dk_part, dv_part  # before the next call makes its own


Index = tuple[slice, slice, slice]


class _Call(NamedTuple):
    """One kernel call: its indices into [b, n, s] on each side, and ``cu_seqlens`` if it has several documents."""

    q: Index
    k: Index
    causal: bool
    cu_seqlens: tuple[int, ...] | None

    def queries(self, x: Tensor) -> Tensor:
        """The part of q, or of a tensor with q's tokens, that the call reads."""
        return x[self.q]

    def keys(self, x: Tensor) -> Tensor:
        """The part of k or v that the call reads."""
        return x[self.k]

    def forward(
        self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.cu_seqlens is None:
            return backend.forward(q, k, v, self.causal, scale, out)
        assert isinstance(backend, VarlenBackend)
        place = None if out is None else _pack(out)
        found, lse = backend.forward_varlen(_pack(q), _pack(k), _pack(v), self.cu_seqlens, scale, place)
        return _unpack(found), lse.unsqueeze(0)

    def backward(
        self, backend: AttentionBackend, grad_out: Tensor, saved: Saved, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.cu_seqlens is None:
            return backend.backward(grad_out, saved, self.causal, scale)
        assert isinstance(backend, VarlenBackend)
        q, k, v, out, lse = saved
        packed = Saved(_pack(q), _pack(k), _pack(v), _pack(out), lse[0])
        dq, dk, dv = backend.backward_varlen(_pack(grad_out), packed, self.cu_seqlens, scale)
        return _unpack(dq), _unpack(dk), _unpack(dv)


class _Strips(NamedTuple):
    """One kernel call for several equal causal squares, each a sequence of the call; methods as for _Call.

    Attributes:
        first: the first square, in one row of the batch.
        number: number of squares; queries and keys of a square begin `step` tokens after those of the square before.
    """

    first: ScoreBlock
    number: int
    step: int

    def queries(self, x: Tensor) -> Tensor:
        return self._part(x, self.first.q_start)

    def keys(self, x: Tensor) -> Tensor:
        return self._part(x, self.first.k_start)

    def _part(self, x: Tensor, start: int) -> Tensor:
        """[b, heads, s, ...] -> a view [number, heads, size, ...]."""
        size, row = self.first.q_stop - self.first.q_start, x[self.first.batch or 0]
        windows = row[:, start : start + (self.number - 1) * self.step + size].unfold(1, size, self.step)
        return windows.transpose(0, 1) if x.dim() == 3 else windows.permute(1, 0, 3, 2)

    def forward(
        self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.first.flipped:
            return backend.forward(q, k, v, True, scale, out)
        found, lse = backend.forward(q.flip(2), k.flip(2), v.flip(2), True, scale)
        return found.flip(2), lse.flip(2)

    def backward(
        self, backend: AttentionBackend, grad_out: Tensor, saved: Saved, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.first.flipped:
            return backend.backward(grad_out, saved, True, scale)
        flipped = Saved(*(x.flip(2) for x in saved))
        dq, dk, dv = backend.backward(grad_out.flip(2), flipped, True, scale)
        return dq.flip(2), dk.flip(2), dv.flip(2)


def _calls(backend: AttentionBackend, scores: Scores, *tensors: Tensor) -> Iterator[_Call | _Strips]:
    """The kernel calls for ``scores``: one for each block, or one for consecutive documents if the backend accepts
    them, or one for equal strips of a window.

    ``tensors`` [s, b, heads, d] are the tensors that the calls read parts of; no part exceeds 32-bit indices of a
    kernel. If all blocks are documents, a document that is alone in its call also runs as a packed one.
    FlashAttention's forward for sequences of one length may split keys, which rounds differently and takes memory.
    """
    most, num_batch = _most_tokens(*tensors), tensors[0].shape[1]
    scores = cut_within(scores, most)
    blocks, window = scores.blocks, scores.window
    is_varlen = isinstance(backend, VarlenBackend) and window is None
    are_documents = len(blocks) > 1 and all(block.causal for block in blocks)
    groups = _runs(blocks, most) if is_varlen else ([block] for block in blocks)
    for run in groups if window is None else strips(scores, most):
        first, last = run[0], run[-1]
        batches = range(num_batch) if first.batch is None else [first.batch]
        if window is not None and first.causal:
            yield from (_Strips(first._replace(batch=i), len(run), step_of(run)) for i in batches)
            continue
        rows, columns = slice(first.q_start, last.q_stop), slice(first.k_start, last.k_stop)
        if len(run) == 1 and not (is_varlen and are_documents):
            batch = slice(None) if first.batch is None else slice(first.batch, first.batch + 1)
            yield _Call((batch, slice(None), rows), (batch, slice(None), columns), first.causal, None)
            continue
        cu_seqlens = (0, *(block.q_stop - first.q_start for block in run))
        for i in batches:
            batch = slice(i, i + 1)
            yield _Call((batch, slice(None), rows), (batch, slice(None), columns), True, cu_seqlens)


def _runs(blocks: Sequence[ScoreBlock], most_tokens: int) -> Iterator[list[ScoreBlock]]:
    """Groups of causal blocks that follow each other without a gap on both sides; each full block is a group."""

    def follows(run: list[ScoreBlock], block: ScoreBlock) -> bool:
        last = run[-1]
        return (
            last.causal
            and block.causal
            and (last.batch, last.q_stop, last.k_stop) == (block.batch, block.q_start, block.k_start)
            and block.q_stop - run[0].q_start <= most_tokens
            and len(run) < MOST_DOCUMENTS
        )

    return grouped(blocks, follows)


def _most_tokens(*tensors: Tensor) -> int:
    """Maximum number of tokens in a call with q, k, v and other tensors [s, b, heads, d].

    In most layouts q, k and v are views of one tensor, whose rows hold the heads of all three. Separate tensors count
    as if they had these long rows, so that blocks are cut in the same way.
    """
    q, k = tensors[:2]
    fused = q.shape[1] * (q.shape[2] + 2 * k.shape[2]) * q.shape[3]
    return most_tokens(max(fused, *(x.stride(0) for x in tensors)))


def _are_apart(scores: Scores) -> bool:
    """Whether all blocks are causal squares of the same tokens on both sides."""
    return all(block.causal and not block.flipped for block in scores.blocks)


def _is_whole(scores: Scores, q: Tensor, k: Tensor) -> bool:
    """Whether one block covers all queries and keys of all batch rows."""
    return len(scores.blocks) == 1 and scores.blocks[0][:5] == (None, 0, q.shape[0], 0, k.shape[0])


def _heads_first(x: Tensor) -> Tensor:
    """View [s, b, n, d] as [b, n, s, d]."""
    return x.permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    """View [b, n, s, d] as [s, b, n, d]."""
    return x.permute(2, 0, 1, 3)


def _pack(x: Tensor) -> Tensor:
    """View [1, n, t, d] as [t, n, d]."""
    return x[0].transpose(0, 1)


def _unpack(x: Tensor) -> Tensor:
    """View [t, n, d] as [1, n, t, d]."""
    return x.transpose(0, 1).unsqueeze(0)
