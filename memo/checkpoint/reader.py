"""Reads stored rectangles into tensors of any other cut, and checks the checksum of each rectangle."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from memo.artifacts.checksum import ALGORITHM, checksum
from memo.checkpoint.chunks import GlobalTensor, Part, overlap, slices
from memo.checkpoint.files import DamagedError, checkpoint_file
from memo.checkpoint.index import Index, StoredRectangle
from memo.errors import CheckpointError
from memo.units import MIB

PIECE_BYTES = 8 * MIB
"""Bytes to read at a time, in whole rows; at least one row."""


def read_parts(folder: Path, index: Index, tensors: Mapping[str, GlobalTensor], *, verify: bool) -> None:
    """Fill the parts of `tensors`, each converted to its own dtype. Files are read in order.

    Every needed rectangle is read whole, and with `verify` its checksum is compared. Raises CheckpointError that names
    file and tensor; parts that were filled before stay filled.
    """
    wanted: dict[str, list[tuple[int, str, StoredRectangle, list[Part]]]] = {}
    for name, tensor in tensors.items():
        for stored in index[name].rectangles:
            parts = [part for part in tensor.parts if overlap((stored.offset, stored.shape), (part.offset, part.shape))]
            if parts:
                wanted.setdefault(stored.file, []).append((stored.at_byte, name, stored, parts))
    for file, entries in wanted.items():
        try:
            with open(checkpoint_file(folder, file), "rb") as opened:
                for _, name, stored, parts in sorted(entries, key=lambda entry: entry[0]):
                    _read(opened, name, stored, index[name].torch_dtype, parts, verify)
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror or error}") from error


def _read(
    file: BinaryIO, name: str, stored: StoredRectangle, dtype: torch.dtype, parts: list[Part], verify: bool
) -> None:
    num_rows, *inner = stored.shape
    row_bytes = math.prod(inner) * dtype.itemsize
    step = max(1, PIECE_BYTES // row_bytes)
    buffer = memoryview(bytearray(min(step, num_rows) * row_bytes))
    digest = checksum()
    views = [part.values().detach() for part in parts]
    file.seek(stored.at_byte)
    for row in range(0, num_rows, step):
        count = min(step, num_rows - row)
        piece = buffer[: count * row_bytes]
        if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
            raise CheckpointError(f"{stored.file} ends amid {name}: it is cut short")
        digest.update(piece)
        values = torch.frombuffer(piece, dtype=dtype).view(count, *inner)
        offset = (stored.offset[0] + row, *stored.offset[1:])
        for part, view in zip(parts, views, strict=True):
            if common := overlap((offset, tuple(values.shape)), (part.offset, part.shape)):
                low, high = common
                view[slices(low, high, part.offset)].copy_(values[slices(low, high, offset)])
    if verify and digest.hexdigest() != stored.xxh3_64:
        raise DamagedError(
            f"{stored.file}: {name}, {stored.shape} at {stored.offset}, has the checksum {digest.hexdigest()} "
            f"({ALGORITHM}), but {stored.xxh3_64} was written: the file is damaged"
        )
