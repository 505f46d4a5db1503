"""Context parallelism: causal attention over a sequence that is split over ranks.

Ranks hold tokens as memo.parallel.zigzag says. The types are Megatron's --cp-comm-type:

  p2p          K/V are passed round a ring, and each rank computes attention with one rank's K/V at a time
  all_gather   every rank gathers all K/V; their gradients are reduce-scattered
  a2a          heads are split instead of tokens during attention (Ulysses, https://arxiv.org/abs/2309.14509)
  a2a+p2p      a2a inside groups of A consecutive ranks, rings across them

If layers are swept tile by tile, memo.parallel.context_sweep computes the attention of one tile.

With cp rank r = j A + i, the zigzag shards of the A ranks i of group j together are exactly shard j of a
zigzag over P = cp / A ranks. So there is one implementation: an exchange of heads (A > 1) around a ring or a
gather (P > 1).

Legend: s tokens of this rank, b batch, n query heads, n_kv key/value heads, d head dim; S tokens after the
exchange of heads (A s). Tensors are [s, b, n, d].
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from memo.attention.backends import AttentionBackend, Saved
from memo.attention.blocks import Chunk, Documents, Scores, attention_blocks
from memo.attention.core import GradSums, OutputMerger, attend, attend_backward, empty_lse, empty_out
from memo.attention.sinks import Sinks
from memo.errors import ConfigError
from memo.parallel.collectives import Shift, all_gather, all_to_all, group_rank, group_size, reduce_scatter
from memo.parallel.zigzag import natural_from_zigzag, zigzag_chunks, zigzag_from_natural
from memo.spec.window import ring_steps
from memo_kernels import wide_dtype

CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


class ContextAttention:
    """Causal attention of one context-parallel rank; build it once and call it for every layer.

    Use it as a function under autograd (``__call__``), or call ``forward`` and ``backward`` with tensors that the
    caller keeps: ``backward`` takes the saved out and lse and never repeats the forward.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        seq_length: int,
        comm_type: str,
        ring_group: ProcessGroup | None,
        a2a_group: ProcessGroup | None,
        scale: float,
        keeps_outputs: bool = True,
        around: Callable[[], AbstractContextManager[None]] | None = None,
        window: int | None = None,
    ) -> None:
        """``a2a_group`` holds A consecutive ranks of the axis, ``ring_group`` every A-th rank; None is one rank.

        "p2p" and "all_gather" use ``ring_group`` alone, and "a2a" uses ``a2a_group`` alone. ``seq_length`` is the
        length of the whole sequence, ``scale`` the factor on the scores (usually d ** -0.5). Without
        ``keeps_outputs``, backward under autograd runs the forward again. A query attends to ``window`` tokens at most
        (memo.spec.window). ``around`` makes a context for each part of the work whose memory requests depend on where
        documents end; memory that is allocated in the context is freed in it.

        Raises ConfigError for an unknown type, groups that do not suit it, or a length that cannot be split.
        """
        self.backend, self.seq_length, self.comm_type, self.scale = backend, seq_length, comm_type, scale
        self.keeps_outputs = keeps_outputs
        self.around, self._makes_results_first = around or nullcontext, around is not None
        self.window = window
        self.ring, self._a2a = ring_group, a2a_group
        self.ring_size, self.ring_rank = group_size(ring_group), group_rank(ring_group)
        self.a2a_size, self.a2a_rank = group_size(a2a_group), group_rank(a2a_group)
        if comm_type not in CP_COMM_TYPES:
            raise ConfigError(f"cp_comm_type is {comm_type!r}; known are {', '.join(CP_COMM_TYPES)}")
        if (comm_type in ("p2p", "all_gather") and self.a2a_size > 1) or (comm_type == "a2a" and self.ring_size > 1):
            raise ConfigError(
                f"cp_comm_type is {comm_type!r}, but the ring group has {self.ring_size} ranks and "
                f"the a2a group {self.a2a_size}; use 'a2a+p2p', or put all ranks in the one group"
            )
        zigzag_chunks(seq_length, self.ring_size * self.a2a_size, 0)
        self._chunks = [zigzag_chunks(seq_length, self.ring_size, j) for j in range(self.ring_size)]
        self._everything = (Chunk(0, seq_length, 0),)
        self._steps = ring_steps(seq_length, self.ring_size, window)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """q [s, b, n, d], k and v [s, b, n_kv, d] -> out [s, b, n, d], differentiable.

        ``documents`` holds the boundaries in the whole sequence, a tuple per batch row; None: one document a
        row. ``sinks`` [n]: a logit for each query head (memo.attention.sinks).
        """
        out = _ContextAttention.apply(self, documents, q, k, v, sinks)
        assert isinstance(out, Tensor)
        return out

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        out: Tensor | None = None,
        sinks: Sinks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute __call__ without autograd -> out [s, b, n, d] and lse [b, n / A, A s], which backward takes.

        ``out``: a tensor for the output, which is then returned. Its last dim must be contiguous.
        """
        self._check(q, k, documents)
        if self.a2a_size == 1:
            return self._forward(q, k, v, documents, out, sinks)
        q, k, v = self.split_heads(q, k, v)
        found, lse = self._forward(q, k, v, documents, None, sinks)
        given = [found]
        del q, k, v, found  # before the exchange makes copies
        (joined,) = self.join_heads(given, out=out)
        return joined, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        documents: Documents | None = None,
        sinks: Sinks | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """grad_out [s, b, n, d], with the inputs and outputs of forward -> dq [s, b, n, d], dk, dv [s, b, n_kv, d].

        Adds the contribution of this rank's queries to the gradient of ``sinks``.
        """
        self._check(q, k, documents)
        if self.a2a_size == 1:
            return self._backward(grad_out, Saved(q, k, v, out, lse), documents, sinks)
        grad_out, q, k, v, out = self.split_heads(grad_out, q, k, v, out)
        given = [*self._backward(grad_out, Saved(q, k, v, out, lse), documents, sinks)]
        del grad_out, q, k, v, out  # before the exchange makes copies
        dq, dk, dv = self.join_heads(given)
        return dq, dk, dv

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, out: Tensor | None, sinks: Sinks | None
    ) -> tuple[Tensor, Tensor]:
        if self.ring_size == 1:
            out, lse = self.attend(q, k, v, self._scores(0, documents), out)
        elif self.comm_type == "all_gather":
            k, v = self._gather(k, v)
            out, lse = self.attend(q, k, v, self._gathered_scores(documents), out)
        else:
            out, lse = self._ring_forward(q, k, v, documents, out)
        if sinks is not None:
            sinks.part(self.a2a_rank, self.a2a_size).join_(out, lse)
        return out, lse

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, out: Tensor | None) -> tuple[Tensor, Tensor]:
        lse = None
        if self._makes_results_first:
            out, lse = empty_out(q) if out is None else out, empty_lse(q)
        with self.around():
            return attend(self.backend, q, k, v, scores, self.scale, out, lse)

    def _backward(
        self, grad_out: Tensor, saved: Saved, documents: Documents | None, sinks: Sinks | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if sinks is not None:
            sinks.part(self.a2a_rank, self.a2a_size).backward(grad_out, saved.out, saved.lse)
        if self.ring_size == 1:
            grads = GradSums.zeros(saved, saved.q.dtype) if self._makes_results_first else None
            with self.around():
                return attend_backward(self.backend, grad_out, saved, self._scores(0, documents), self.scale, grads)
        if self.comm_type == "all_gather":
            return self._gathered_backward(grad_out, saved, documents)
        return self._ring_backward(grad_out, saved, documents)

    # p2p: at step t this rank holds the keys and values of ring rank (rank - t). Steps without scores are skipped.

    def _ring_forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kv = torch.stack((k, v))  # [2, S, b, n_kv, d], one message
        merger = OutputMerger(q, out)
        for step, following in zip(self._steps, (*self._steps[1:], None), strict=True):
            incoming = None if following is None else Shift(kv, self.ring, following - step)
            with self.around():
                merger.add(self.backend, q, kv[0], kv[1], self._scores(step, documents), self.scale)
            if incoming:
                kv = incoming.wait()
        return merger.result()

    def _ring_backward(
        self, grad_out: Tensor, saved: Saved, documents: Documents | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pass dk and dv round the ring one step behind their k and v; one more message returns them to their rank.

        A step's kernel runs while the sums of the ranks before arrive; its results are then added to these.
        """
        kv = torch.stack((saved.k, saved.v))
        dtype = wide_dtype(kv.dtype)
        dq = torch.zeros(saved.q.shape, dtype=dtype, device=kv.device)
        dkv = torch.zeros(kv.shape, dtype=dtype, device=kv.device)
        incoming_dkv: Shift | None = None
        for step, following in zip(self._steps, (*self._steps[1:], None), strict=True):
            incoming = None if following is None else Shift(kv, self.ring, following - step)
            wait = None if incoming_dkv is None else incoming_dkv.wait
            scores = self._scores(step, documents)
            with self.around():
                GradSums(dq, dkv[0], dkv[1]).add(
                    self.backend, grad_out, saved._replace(k=kv[0], v=kv[1]), scores, self.scale, wait
                )
            if wait is not None:
                wait()  # if this step has no scores, nothing has waited
            incoming_dkv = Shift(dkv, self.ring, (self.ring_size if following is None else following) - step)
            dkv = incoming_dkv.received
            if incoming:
                kv = incoming.wait()
        assert incoming_dkv is not None
        dkv = incoming_dkv.wait().to(kv.dtype)
        return dq.to(kv.dtype), dkv[0], dkv[1]

    # all_gather: keys and values of the whole sequence, in natural order.

    def _gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kv = all_gather(torch.cat((k, v), dim=-1), self.ring)  # [cp s, b, n_kv, 2 d], one message
        k, v = natural_from_zigzag(kv, self.ring_size).chunk(2, dim=-1)
        return k, v

    def _gathered_backward(
        self, grad_out: Tensor, saved: Saved, documents: Documents | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self._gather(saved.k, saved.v)
        dtype = wide_dtype(k.dtype)
        dq = torch.zeros(saved.q.shape, dtype=dtype, device=k.device)
        dkv = torch.zeros((*k.shape[:-1], 2 * k.shape[-1]), dtype=dtype, device=k.device)
        with self.around():
            GradSums(dq, *dkv.chunk(2, dim=-1)).add(
                self.backend, grad_out, saved._replace(k=k, v=v), self._gathered_scores(documents), self.scale
            )
        del k, v  # before a copy of dk and dv is made
        ordered = zigzag_from_natural(dkv, self.ring_size)
        del dkv
        dk, dv = reduce_scatter(ordered, self.ring).to(saved.k.dtype).chunk(2, dim=-1)
        return dq.to(saved.q.dtype), dk, dv

    # a2a: exchanges tokens of all heads for all tokens of some heads, and back.

    def split_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each [s, b, heads, d] -> [A s, b, heads / A, d] in natural order; one collective for all tensors."""
        s, b, _, d = tensors[0].shape
        shares = [x.shape[2] // self.a2a_size for x in tensors]
        by_rank = [x.reshape(s, b, self.a2a_size, -1, d).permute(2, 0, 1, 3, 4) for x in tensors]
        mine = all_to_all(torch.cat(by_rank, dim=3), self._a2a)  # [A, s, b, sum of shares, d]
        return natural_from_zigzag(mine.flatten(0, 1), self.a2a_size).split(shares, dim=2)

    def join_heads(self, tensors: list[Tensor], out: Tensor | None = None) -> tuple[Tensor, ...]:
        """The inverse of split_heads: each [A s, b, heads / A, d] -> [s, b, heads, d].

        ``tensors`` is emptied: memory that nothing else refers to is free for the exchange. ``out``: a tensor for the
        result; allowed for a single input.
        """
        shares = [x.shape[2] for x in tensors]
        joined = torch.cat(tensors, dim=2)
        tensors.clear()
        mine = zigzag_from_natural(joined, self.a2a_size)
        del joined
        by_rank = all_to_all(mine.unflatten(0, (self.a2a_size, -1)), self._a2a)  # [A, s, b, sum of shares, d]
        del mine
        whole = [x.permute(1, 2, 0, 3, 4) for x in by_rank.split(shares, dim=3)]  # [s, b, A, share, d]
        if out is not None:
            out.unflatten(2, (self.a2a_size, -1)).copy_(*whole)
            return (out,)
        return tuple(x.flatten(2, 3) for x in whole)

    def _scores(self, step: int, documents: Documents | None) -> Scores:
        own = self._chunks[self.ring_rank]
        return attention_blocks(own, self._chunks[(self.ring_rank - step) % self.ring_size], documents, self.window)

    def _gathered_scores(self, documents: Documents | None) -> Scores:
        return attention_blocks(self._chunks[self.ring_rank], self._everything, documents, self.window)

    def _check(self, q: Tensor, k: Tensor, documents: Documents | None) -> None:
        cp_size = self.ring_size * self.a2a_size
        s, b, num_heads, _ = q.shape
        if s * cp_size != self.seq_length:
            raise ValueError(
                f"q has {s} tokens on each of {cp_size} ranks, but seq_length is {self.seq_length}; "
                f"pass this rank's {self.seq_length // cp_size} tokens (token_indices)"
            )
        if num_heads % self.a2a_size or k.shape[2] % self.a2a_size:
            raise ConfigError(
                f"an a2a group of {self.a2a_size} ranks cannot split {num_heads} query heads and "
                f"{k.shape[2]} key/value heads evenly; use a smaller one with 'a2a+p2p', or 'p2p'"
            )
        if documents is not None and (
            len(documents) != b or any(row[0] != 0 or row[-1] != self.seq_length for row in documents)
        ):
            ends = [(row[0], row[-1]) for row in documents]
            raise ValueError(
                f"documents has {len(documents)} rows with (first, last) boundaries {ends}, "
                f"but the batch has {b} rows of {self.seq_length} tokens; "
                f"give one tuple (0, ..., {self.seq_length}) per row"
            )


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attention: ContextAttention,
        documents: Documents | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        out, lse = attention.forward(q, k, v, documents, sinks=None if sinks is None else Sinks(sinks))
        ctx.attention, ctx.documents = attention, documents
        ctx.save_for_backward(q, k, v, sinks, *((out, lse) if attention.keeps_outputs else ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, logits, *outputs = ctx.saved_tensors
        sinks = None if logits is None else Sinks(logits, torch.zeros_like(logits, dtype=wide_dtype(q.dtype)))
        out, lse = outputs or ctx.attention.forward(q, k, v, ctx.documents, sinks=sinks)
        dq, dk, dv = ctx.attention.backward(grad_out, q, k, v, out, lse, ctx.documents, sinks)
        return None, None, dq, dk, dv, None if sinks is None or sinks.gradient is None else sinks.gradient.to(q.dtype)
