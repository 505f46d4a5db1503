"""The table of token embeddings, split over tensor parallelism by the rows of the vocabulary.

Shapes as in memo.parallel.tensor; v rows of the table that this tp rank holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.collectives import all_gather, group_rank, group_size, reduce_scatter
from memo.parallel.hidden import Hidden, Section, in_one_section
from memo.parallel.weight_gradients import gradient_added, own_sum
from memo_kernels import wide_dtype

_CHUNK = 8192
"""Maximum number of tokens whose unsharded embeddings exist at one time."""


class VocabParallelEmbedding(nn.Module):
    """A table split by the rows of the vocabulary, padded so that every rank has the same number of rows.

    Padding rows are not part of the model: they stay zero, and the loss leaves them out, so the model does not depend
    on tp. Input tokens [s, b], output [n, b, h], times `scale`.
    """

    def __init__(self, weight: nn.Parameter, group: ProcessGroup | None, scale: float = 1.0) -> None:
        super().__init__()
        self.weight, self.group, self.scale = weight, group, scale
        self.first_row = group_rank(group) * weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        if group_size(self.group) == 1 and self.weight.requires_grad:
            return _scaled_(F.embedding(tokens, self.weight), self.scale)
        return self.in_sections(tokens, None, None, in_one_section(tokens.shape[0] // group_size(self.group)))

    def in_sections(
        self, tokens: Tensor, positions: Tensor | None, of_positions: nn.Parameter | None, hidden: Hidden
    ) -> Tensor:
        """Do `forward` section by section, and add rows `positions` [n, b] of `of_positions` [p, h], if given.

        Sums of gradients over tokens are cut at tiles, so that they do not depend on sections, to the last bit.
        """
        anchor = _anchor(self.weight)
        y: Tensor = _Embedding.apply(self.weight, of_positions, tokens, positions, self, hidden, anchor)
        return y


def _scaled_(x: Tensor, scale: float) -> Tensor:
    """Scale x in place."""
    return x if scale == 1 else x.mul_(scale)


class _Embedding(torch.autograd.Function):
    """y [n, b, h] = reduce_scatter(rows of the table for tokens [s, b], 0 where another rank has the row).

    Works on one chunk of tokens at a time: the unsharded embeddings of all s tokens would be tp times as large as the
    output, which makes them the largest tensor of a step on long sequences.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        of_positions: Tensor | None,
        tokens: Tensor,
        positions: Tensor | None,
        table: VocabParallelEmbedding,
        hidden: Hidden,
        anchor: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(tokens, positions)
        ctx.table, ctx.hidden, ctx.of_positions = table, hidden, of_positions
        group = table.group
        y = hidden.begin((tokens.shape[0] // group_size(group), tokens.shape[1], weight.shape[1]), weight)
        for section in hidden.sections:
            part = hidden.room(y, section.index)
            for chunk in _chunks(section, tokens, table):
                x = F.embedding(chunk.rows, weight).masked_fill_(chunk.foreign.unsqueeze(-1), 0.0)
                _scaled_(x, table.scale)
                reduce_scatter(x, group, out=part[chunk.of_section])
                if of_positions is not None and positions is not None:
                    part[chunk.of_section] += F.embedding(positions[chunk.of_rank], of_positions)
            hidden.put(part, section.index)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, positions = ctx.saved_tensors
        table, hidden = ctx.table, ctx.hidden
        grad = hidden.whole(grads[0])
        total, of_positions = _gradient_sum(table.weight), _gradient_sum(ctx.of_positions)
        for section in hidden.sections:
            part = hidden.take(grad, section.index)
            for chunk in _chunks(section, tokens, table):
                own = part[chunk.of_section]
                if of_positions is not None:
                    _add_rows(of_positions, own, positions[chunk.of_rank])
                if total is None:
                    continue
                gathered = all_gather(own, table.group).masked_fill_(chunk.foreign.unsqueeze(-1), 0.0)
                _add_rows(total, _scaled_(gathered, table.scale), chunk.rows)
                del gathered
        of_table = _to_autograd(table.weight, total), _to_autograd(ctx.of_positions, of_positions)
        return *of_table, None, None, None, None, None


def _anchor(like: Tensor) -> Tensor:
    """Return an input that requires a gradient, so that autograd runs the backwards of all layers down to here, even if
    the table is frozen."""
    return torch.empty(0, device=like.device, requires_grad=True)


def _gradient_sum(table: Tensor | None) -> Tensor | None:
    """The sum of the gradients of chunks, never in bf16; None if there is no table, or it is frozen."""
    if table is None or not table.requires_grad:
        return None
    main = own_sum(table)
    if main is not None:
        return main
    return torch.zeros_like(table, dtype=wide_dtype(table.dtype))


def _to_autograd(table: Tensor, total: Tensor | None) -> Tensor | None:
    """Return to autograd the complete sum of `_gradient_sum(table)`, or None if it is in the main gradient already."""
    if total is None:
        return None
    if own_sum(table) is None:
        return total.to(table.dtype)
    gradient_added(table)
    return None


def _add_rows(total: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Add the gradients [c, b, h] of these rows [c, b] of a table; deterministic, unlike index_add on CUDA."""
    total += torch.ops.aten.embedding_dense_backward(grad, rows, total.shape[0], -1, False)


@dataclass(frozen=True)
class _Chunk:
    """Some tokens of a section.

    Attributes:
        of_section, of_rank: their ranges in the section and among this rank's tokens.
        rows: [c, b], the rows of the table for these tokens of all tp ranks, counted from this rank's first row.
        foreign: mask of the rows that another rank holds; 0 stands for them in `rows`.
    """

    of_section: slice
    of_rank: slice
    rows: Tensor
    foreign: Tensor


def _chunks(section: Section, tokens: Tensor, table: VocabParallelEmbedding) -> Iterator[_Chunk]:
    """Yield the chunks of a section, tile after tile."""
    size = group_size(table.group)
    by_rank = tokens.unflatten(0, (size, -1))
    step, first = max(1, _CHUNK // (size * tokens.shape[1])), section.rows.start
    for tile in section.tiles:
        for start in range(tile.start, tile.stop, step):
            chunk = slice(start, min(start + step, tile.stop))
            of_rank = slice(first + chunk.start, first + chunk.stop)
            rows = by_rank[:, of_rank].flatten(0, 1) - table.first_row
            foreign = (rows < 0) | (rows >= table.weight.shape[0])
            yield _Chunk(chunk, of_rank, rows.masked_fill_(foreign, 0), foreign)
