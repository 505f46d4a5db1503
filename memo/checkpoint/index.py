"""index.json of a checkpoint: the place of each rectangle of each global tensor, and the checksum of its bytes.

    {"schema": "memo_checkpoint_index", "version": 1, "tensors": {
        "master/layers.0.mlp.fc1.weight": {"shape": [64, 32], "dtype": "float32", "rectangles": [
            {"offset": [0, 0], "shape": [40, 32], "file": "tensors-00000.bin", "at_byte": 0, "xxh3_64": "..."}, ...]}}}

The bytes of a rectangle are its numbers in row-major order, little-endian, without header or padding, so NumPy can read
one tensor without memo.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import torch

from memo.artifacts.fields import Count, FileName, PositiveInt, Rule, build
from memo.artifacts.reading import parse_json
from memo.checkpoint.files import INDEX, checkpoint_file, damaged
from memo.errors import CheckpointError

_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""torch's names of the dtypes that stored tensors can have."""
_MAX_DIMS = 8
MAX_BYTES = 512 << 20
"""Limit of the file's size. The optimizer states of 70B parameters on 4,096 ranks are a million rectangles, 150 bytes
each."""
_BYTES_A_VALUE = 12
"""The text of rectangles has at least this many bytes for each comma or bracket."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredRectangle:
    """A rectangle of a global tensor, the file and the offset of its bytes, and their checksum."""

    offset: tuple[Count, ...]
    shape: tuple[PositiveInt, ...]
    file: FileName
    at_byte: Count
    xxh3_64: str


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor; its rectangles cover it without overlaps."""

    shape: tuple[PositiveInt, ...]
    dtype: Annotated[str, Rule(f"such as {' or '.join(_DTYPES)}", _DTYPES.__contains__)]
    rectangles: tuple[StoredRectangle, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class _Document:
    schema: Literal["memo_checkpoint_index"]
    version: Literal[1]
    tensors: dict[str, StoredTensor]


Index = Mapping[str, StoredTensor]
"""{"kind/global name": tensor}."""


def merged(parts: Iterable[Index]) -> dict[str, StoredTensor]:
    """Merge the indexes of several ranks. Raises CheckpointError if they contradict each other."""
    found: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.items():
            known = found.get(name, StoredTensor(tensor.shape, tensor.dtype, ()))
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(f"{name} is {known.shape} of {known.dtype}, and {tensor.shape} of {tensor.dtype}")
            found[name] = StoredTensor(known.shape, known.dtype, known.rectangles + tensor.rectangles)
    check_rectangles(found)
    return found


def to_json(index: Index) -> str:
    """The text of the file. Raises CheckpointError if it exceeds the limit of from_json."""
    text = json.dumps(_Document("memo_checkpoint_index", 1, dict(index)), default=vars) + "\n"
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"{INDEX} would have {len(text)} bytes, but {MAX_BYTES} is the most that is read")
    return text


def from_json(content: bytes) -> dict[str, StoredTensor]:
    """The index that to_json wrote. Raises CheckpointError for any other content."""
    source = damaged(INDEX)
    values = parse_json(content, source, max_values=64 + len(content) // _BYTES_A_VALUE)
    index = build(_Document, values, source).tensors
    check_rectangles(index)
    return index


def check_rectangles(index: Index) -> None:
    """Raises CheckpointError unless the rectangles of each tensor cover it without overlaps."""
    for name, tensor in index.items():
        dims = {len(tensor.shape)}.union(*({len(r.offset), len(r.shape)} for r in tensor.rectangles))
        if len(dims) > 1 or not 0 < len(tensor.shape) <= _MAX_DIMS:
            raise CheckpointError(f"{name} has {len(tensor.shape)} dims, and its rectangles {sorted(dims)}")
        if not covers(tensor.shape, [(rectangle.offset, rectangle.shape) for rectangle in tensor.rectangles]):
            raise CheckpointError(f"the rectangles of {name} overlap, or do not fill its shape {tensor.shape}")


def check_files(final: Path, index: Index) -> None:
    """Raises CheckpointError unless every file exists, lies in directory `final`, and is long enough."""
    needed_bytes: dict[str, int] = {}
    for tensor in index.values():
        for rectangle in tensor.rectangles:
            end = rectangle.at_byte + math.prod(rectangle.shape) * tensor.torch_dtype.itemsize
            needed_bytes[rectangle.file] = max(end, needed_bytes.get(rectangle.file, 0))
    for file, num_bytes in needed_bytes.items():
        found_bytes = checkpoint_file(final, file).stat().st_size
        if found_bytes < num_bytes:
            raise CheckpointError(f"{file} has {found_bytes} bytes, but {num_bytes} were written: it is cut short")


def covers(shape: Shape, rectangles: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether rectangles, (offset, shape) each, fill `shape` without overlaps; O(rectangles x 2^dims).

    Each corner of a rectangle counts +1 or -1, depending on how many of its coordinates are upper ends. These numbers
    are the mixed difference of the function that is 1 inside of the rectangle and 0 outside. If the sums over all
    rectangles equal the numbers of `shape`, the sum of their functions equals that of `shape`.
    """
    corners: Counter[Shape] = Counter()
    for weight, offset, size in ((-1, (0,) * len(shape), shape), *((1, *rectangle) for rectangle in rectangles)):
        for uppers in product((0, 1), repeat=len(shape)):
            corner = tuple(o + s * upper for o, s, upper in zip(offset, size, uppers, strict=True))
            corners[corner] += weight * (-1) ** sum(uppers)
    return not any(corners.values())
