"""Cuts a flat ZeRO-1 shard into rectangles of global tensors.

A shard begins and ends anywhere in a parameter, so its part of a matrix is a partial row, some whole rows and a second
partial row: three rectangles. They are cut further if the local parameter consists of several global tensors (fused
qkv). Rectangles have global offsets, so a checkpoint of one layout can be loaded into any other layout.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memo.parallel.shards import Shard
from memo.spec.buckets import Segment

Shape = tuple[int, ...]
Rectangle = tuple[Shape, Shape]
"""(offset, shape)."""


@dataclass(frozen=True)
class Part:
    """A rectangle of a global tensor that this rank holds; `values` returns a view of its memory, or reads it."""

    offset: Shape
    shape: Shape
    values: Callable[[], Tensor]

    @staticmethod
    def of(offset: Sequence[int], values: Tensor) -> "Part":
        return Part(tuple(offset), tuple(values.shape), lambda: values)

    @property
    def place(self) -> tuple[slice, ...]:
        """The slices of the whole tensor that are this part."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class GlobalTensor:
    """A global tensor of which this rank holds some rectangles."""

    shape: Shape
    dtype: torch.dtype
    parts: list[Part]

    @staticmethod
    def whole(values: Tensor) -> "GlobalTensor":
        """A global tensor that this rank holds whole."""
        return GlobalTensor(tuple(values.shape), values.dtype, [Part.of((0,) * values.ndim, values)])


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """The flat range [start, stop) of a row-major tensor as at most 2 * len(shape) - 1 rectangles, in flat order."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row_size = math.prod(shape[1:])
    first, last = start // row_size, (stop - 1) // row_size

    def within(row: int, begin: int, end: int) -> list[Rectangle]:
        inner = rectangles(shape[1:], begin - row * row_size, end - row * row_size)
        return [((row, *offset), (1, *size)) for offset, size in inner]

    if first == last and stop - start < row_size:
        return within(first, start, stop)
    found = []
    if start % row_size:
        found += within(first, start, (first + 1) * row_size)
        first += 1
    whole_rows = stop // row_size - first
    if whole_rows:
        found.append(((first, *([0] * (len(shape) - 1))), (whole_rows, *shape[1:])))
    if stop % row_size:
        found += within(last, last * row_size, stop)
    return found


def global_chunks(segment: Segment, shard: Shard, values: Tensor) -> dict[str, GlobalTensor]:
    """Cut the 1-D `values` of a segment into views that are rectangles of global tensors; returns these by name."""
    found: dict[str, GlobalTensor] = {}
    consumed = 0
    for offset, shape in rectangles(segment.range.shape, segment.start, segment.stop):
        count = math.prod(shape)
        local = values[consumed : consumed + count].view(shape)
        consumed += count
        for piece in shard.pieces:
            if common := overlap((offset, shape), (piece.local_offset, piece.shape)):
                low, high = common
                at = [g + a - start for g, a, start in zip(piece.offset, low, piece.local_offset, strict=True)]
                whole = found.setdefault(piece.name, GlobalTensor(piece.global_shape, values.dtype, []))
                whole.parts.append(Part.of(at, local[slices(low, high, offset)]))
    return found


def overlap(one: Rectangle, other: Rectangle) -> tuple[Shape, Shape] | None:
    """(low, high) corners of the intersection of two rectangles of a tensor; None if it is empty."""
    (offset, shape), (other_offset, other_shape) = one, other
    low = tuple(map(max, offset, other_offset))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def slices(low: Shape, high: Shape, origin: Shape) -> tuple[slice, ...]:
    """The slices of the rectangle between two corners, within a tensor whose first element is at `origin`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
