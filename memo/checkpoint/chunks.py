"""A flat ZeRO-1 shard as rectangles of global tensors, in the words of torch.distributed.checkpoint.

A shard begins and ends anywhere in a parameter, so its part of a matrix is a partial row, some whole
rows and another partial row: three rectangles. Each is cut further where the local parameter is
made of several global tensors (fused qkv). A tensor that knows its rectangles is all that
torch.distributed.checkpoint needs to save from one layout and load into any other, without communication.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from memo.parallel.buckets import Segment
from memo.parallel.shards import Shard

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape)."""


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """The flat range [start, stop) of a row-major tensor as rectangles, in flat order.

    At most 2 * len(shape) - 1 of them.
    """
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


def global_chunks(segment: Segment, shard: Shard, values: Tensor) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    """Cut the 1-D `values` of a segment into rectangles of global tensors.

    Returns, by global name: (global shape, [(offset in the global tensor, view of values)]).
    """
    found: dict[str, tuple[tuple[int, ...], list[Any]]] = {}
    consumed = 0
    for offset, shape in rectangles(segment.slot.shape, segment.start, segment.stop):
        count = math.prod(shape)
        local = values[consumed : consumed + count].view(shape)
        consumed += count
        for piece in shard.pieces:
            low = [max(a, b) for a, b in zip(offset, piece.local_offset, strict=True)]
            high = [
                min(a + n, b + m) for a, n, b, m in zip(offset, shape, piece.local_offset, piece.shape, strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                part = local[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
                at = tuple(g + a - start for g, a, start in zip(piece.offset, low, piece.local_offset, strict=True))
                found.setdefault(piece.name, (piece.global_shape, []))[1].append((at, part))
    return found


class ChunkedTensor(torch.Tensor):
    """A global tensor of which this rank holds some rectangles, as views of memory elsewhere."""

    chunks: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(
        cls, global_shape: Sequence[int], chunks: Sequence[tuple[Sequence[int], Tensor]], dtype: torch.dtype
    ) -> "ChunkedTensor":
        tensor: ChunkedTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(global_shape), dtype=dtype)
        tensor.chunks = {torch.Size(offset): values for offset, values in chunks}
        return tensor

    # The protocol of torch.distributed.checkpoint's planner for tensor subclasses.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, values.size()),
                    properties=TensorProperties.create_from_tensor(values),
                    size=self.size(),
                ),
            )
            for offset, values in self.chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, values.size()) for offset, values in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on a ChunkedTensor: it only describes where its parts are")
