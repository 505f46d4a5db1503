"""Writes the tensors of one rank to one file, with a checksum of each rectangle."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from memo.artifacts.checksum import checksum
from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.index import StoredRectangle, StoredTensor
from memo.units import MIB

PIECE_BYTES = MIB
"""Bytes of a piece, which stays in a core's cache from its checksum to its write.

Tensors on a device are copied to host memory piece by piece; tensors in host memory are not copied."""


def write_file(path: Path, tensors: Mapping[str, GlobalTensor], on_read: Callable[[], None]) -> dict[str, StoredTensor]:
    """Write this rank's rectangles one after the other and sync the file; writes no file if there are none.

    Returns the place of each rectangle. `on_read` is called once the tensors may change, before the file is synced.
    Raises OSError.
    """
    stored: dict[str, StoredTensor] = {}
    if any(tensor.parts for tensor in tensors.values()):
        with open(path, "xb") as file:  # the file must be new, as this save has made the directory
            for name, tensor in tensors.items():
                rectangles = []
                for part in tensor.parts:
                    at_byte = file.tell()
                    digest = write_values(file, part.values())
                    rectangles.append(StoredRectangle(part.offset, part.shape, path.name, at_byte, digest))
                stored[name] = StoredTensor(tensor.shape, str(tensor.dtype).removeprefix("torch."), tuple(rectangles))
            file.flush()
            on_read()
            os.fsync(file.fileno())
    else:
        on_read()
    return stored


def write_values(file: BinaryIO, values: Tensor) -> str:
    """Append the bytes of a tensor in row-major order; returns their checksum."""
    digest = checksum()
    for piece in _pieces(values):
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest()


def _pieces(values: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, PIECE_BYTES at a time; a contiguous tensor in host memory is not copied."""
    # Viewed as bytes, because NumPy does not have all of torch's dtypes.
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES].cpu().numpy().data
