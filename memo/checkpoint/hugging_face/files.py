"""Reads safetensors files of a directory, also single rectangles of their tensors, and writes such files.

    8 bytes     length of the header, little-endian
    header      JSON: {name of a tensor: {"dtype", "shape", "data_offsets": [begin, end) after the header}}, and blanks
    tensors     in row-major order, one after the other

Files are memory-mapped one at a time, so that at most one file of a model is in memory at once.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memo.artifacts.checksum import checksum
from memo.artifacts.fields import FileName, checked
from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source, opened, read_json_object, shown
from memo.artifacts.regular_file import replacing
from memo.checkpoint.writer import write_values
from memo.config.hugging_face import INDEX_FILE, SINGLE_FILE, download_hint, has_weights, other_format
from memo.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""{name in safetensors: dtype}. Other dtypes (integers, 8-bit floats) occur in quantised models, or are no weights."""

_COPIED_BYTES = 1 << 24
_SAMPLED_BYTES = 1 << 12


@dataclass(frozen=True)
class FileTensor:
    """The place, shape and dtype of a tensor, as the header of its file says."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """All tensors of DIR/model.safetensors, or of the shards that DIR/model.safetensors.index.json names."""

    def __init__(self, directory: str | Path) -> None:
        """Read the header of every file.

        Raises CheckpointError for a file that is missing, cut short or differs from the index, and for a link that
        leads out of the directory.
        """
        self.directory = Path(directory)
        self._open: tuple[str, Any] | None = None
        if not has_weights(directory):
            raise CheckpointError(
                f"{self.directory} has neither {SINGLE_FILE} nor {INDEX_FILE}: "
                + (
                    other_format(directory)
                    or f"{download_hint(directory)}; other formats (.bin, .pth) must be saved as safetensors first"
                )
            )
        index = self.directory / INDEX_FILE
        indexed = {} if model_file(directory, INDEX_FILE) is None else _read_index(index)
        files = sorted(set(indexed.values())) or [SINGLE_FILE]
        self._check_presence(files)
        self.tensors = {name: stored for file in files for name, stored in self._headers(file).items()}
        for name, file in indexed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointError(
                    f"{index} says that {shown(name)} lies in {file}, but it is not there: "
                    f"{download_hint(directory)} again"
                )

    def read(self, name: str, slices: Sequence[slice]) -> Tensor:
        """Copy part of a tensor, in its own dtype. Raises CheckpointError if the file cannot be read."""
        file = self.tensors[name].file
        try:
            if self._open is None or self._open[0] != file:
                self.close()
                self._open = (file, safe_open(self.directory / file, framework="pt"))
            part: Tensor = self._open[1].get_slice(name)[tuple(slices)]
        except (SafetensorError, OSError, MemoryError) as error:
            raise CheckpointError(
                f"{self.directory / file}: {name} cannot be read ({error}): {download_hint(self.directory)} again"
            ) from error
        return part

    def close(self) -> None:
        """Unmap the file that was read last."""
        self._open = None

    def fingerprint(self) -> str:
        """A checksum that distinguishes models: of the files' headers and the first bytes of each tensor. All bytes
        would take minutes. Raises OSError."""
        digest = checksum()
        for file in sorted({tensor.file for tensor in self.tensors.values()}):
            path = self.directory / file
            header, begin = _read_header(path)
            digest.update(json.dumps(header, sort_keys=True).encode())
            with open(path, "rb") as opened_file:
                for start, end in _offsets(header).values():
                    opened_file.seek(begin + start)
                    digest.update(opened_file.read(min(end - start, _SAMPLED_BYTES)))
        return digest.hexdigest()

    def copy(self, names: Sequence[str], target: Path) -> None:
        """Copy tensors of any dtype to one file, in pieces of at most _COPIED_BYTES. Raises OSError."""
        headers = {file: _read_header(self.directory / file) for file in {self.tensors[name].file for name in names}}
        entries = {name: headers[self.tensors[name].file][0][name] for name in names}
        lengths = {name: end - begin for name, (begin, end) in _offsets(entries).items()}
        ordered = sorted(names, key=lambda name: -lengths[name] / max(1, math.prod(entries[name]["shape"])))
        with replacing(target) as file:
            file.write(_header({n: (entries[n]["dtype"], entries[n]["shape"], lengths[n]) for n in ordered}))
            for name in ordered:
                shard = self.tensors[name].file
                with open(self.directory / shard, "rb") as source:
                    source.seek(headers[shard][1] + entries[name]["data_offsets"][0])
                    for start in range(0, lengths[name], _COPIED_BYTES):
                        file.write(source.read(min(_COPIED_BYTES, lengths[name] - start)))

    def _check_presence(self, files: list[str]) -> None:
        missing = [file for file in files if model_file(self.directory, file) is None]
        if missing:
            raise CheckpointError(
                f"{self.directory / missing[0]} does not exist, though {INDEX_FILE} names it ({len(missing)} of "
                f"{len(files)} files are missing): {download_hint(self.directory)}"
            )

    def _headers(self, file: str) -> dict[str, FileTensor]:
        path = self.directory / file
        with opened(path, Source(str(path), CheckpointError, f"{download_hint(self.directory)} again")):
            pass  # for its errors: safetensors calls every file that it cannot open missing
        try:
            with safe_open(path, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  no mapping
                return {
                    name: FileTensor(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()
                }
        except (SafetensorError, OSError, MemoryError) as error:
            size = path.stat().st_size
            raise CheckpointError(
                f"{path} is damaged or cut short at {size} bytes ({error}): {download_hint(self.directory)} again"
            ) from error


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file, with the usual permissions of new files; safetensors' own function gives only the owner access.

    Wide dtypes come first and the header is padded to 8 bytes, so that each tensor is aligned to its item size. Raises
    OSError.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda named: -named[1].dtype.itemsize)
    with replacing(path) as file:
        file.write(_header({name: (names[x.dtype], list(x.shape), x.nbytes) for name, x in ordered}))
        for _, tensor in ordered:
            write_values(file, tensor)


def _header(tensors: Mapping[str, tuple[str, list[int], int]]) -> bytes:
    """The header of a file with these tensors; `tensors`: {name: (dtype, shape, bytes)}."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, length) in tensors.items():
        begin, end = end, end + length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(path: Path) -> dict[str, int]:
    """{name: bytes} of the tensors in a file. Raises CheckpointError for a damaged file."""
    try:
        with safe_open(path, framework="pt"):
            pass  # opening checks the header
        return {name: end - begin for name, (begin, end) in _offsets(_read_header(path)[0]).items()}
    except (SafetensorError, OSError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy it again from the model that it came from") from error


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file that safetensors has checked, and the byte at which its tensors begin."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _offsets(header: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    return {name: tuple(entry["data_offsets"]) for name, entry in header.items()}


def _read_index(path: Path) -> dict[str, str]:
    """{name of a tensor: its file}."""
    source = Source(str(path), CheckpointError, f"{download_hint(path.parent)} again")
    weight_map = read_json_object(path, source).get("weight_map")
    files: dict[str, str] = checked(dict[str, FileName], weight_map, "weight_map", source)
    if not files:
        raise source.refusal("weight_map is empty")
    return files
