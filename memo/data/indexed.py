"""Megatron-LM's token file pair, PREFIX.bin and PREFIX.idx, byte for byte.

    .bin   the tokens of all documents, end to end, in one little-endian dtype
    .idx   magic       9 bytes   b"MMIDIDX\\0\\0"
           version     uint64    1
           dtype code  uint8     see DTYPE_CODES
           S           uint64    number of sequences
           D + 1       uint64    number of documents + 1
           lengths     int32     [S] tokens
           pointers    int64     [S] byte offset of each sequence in .bin
           documents   int64     [D + 1] first sequence of each document, then S

Source: NVIDIA Megatron-LM, megatron/core/datasets/indexed_dataset.py. A document may have several sequences; memo
writes one for each document. The multimodal variant, which appends one mode byte for each sequence, is refused by its
size.
"""

import contextlib
import mmap
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from memo.artifacts.checksum import checksum
from memo.artifacts.reading import Source, opened
from memo.artifacts.regular_file import open_regular
from memo.config.split import WHOLE, Part, documents_of
from memo.errors import DataError, writing

_NUM_SLICES, _SLICE_TOKENS = 64, 4096
"""Number of slices of a corpus that go into its hash, and tokens of each slice."""

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_HEADER = struct.Struct("<9sQBQQ")
_MAX_SEQUENCE_LENGTH = 2**31 - 1
_FREE_DOCUMENTS = 1 << 20
"""This many documents may be empty; more documents need at least a byte of tokens each, which limits an index's size.
"""


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 for vocabularies below 65,500, else int32: Megatron-LM's rule."""
    return DTYPE_CODES[8] if vocab_size < 65500 else DTYPE_CODES[4]


class IndexedDatasetWriter:
    """Streams documents into a new dataset; a context manager.

    Everything is written under temporary names. A clean exit moves the files into place, the index last; an exception
    removes them. So an .idx under its final name always belongs to a whole dataset, even after a kill, and a failed
    build leaves an older dataset of the same name unchanged.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        """Raises DataError if the format has no code for `dtype`."""
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        codes = [code for code, known in DTYPE_CODES.items() if known == self.dtype]
        if not codes:
            names = ", ".join(known.name for known in DTYPE_CODES.values())
            raise DataError(f"dtype {self.dtype} cannot be stored in {prefix}.bin; use one of {names}")
        self._dtype_code = codes[0]
        self._lengths: list[int] = []
        self._side_files: dict[str, bytes] = {}
        self._is_complete = False

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    def __enter__(self) -> Self:
        """Raises DataError, like all methods below, for a file that cannot be written, such as on a full disk."""
        with self._writing(".bin"):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = self._temporary(".bin")
        return self

    def add_document(self, tokens: ArrayLike) -> None:
        """Append one document, shape [n]. Raises DataError for values that the dtype cannot hold."""
        values = np.asarray(tokens)
        if values.ndim != 1:
            raise DataError(f"document {self.num_documents} has shape {values.shape}; a document has one dim")
        if values.size > _MAX_SEQUENCE_LENGTH:
            raise DataError(
                f"document {self.num_documents} has {values.size} tokens, but the format counts them in an "
                f"int32 (at most {_MAX_SEQUENCE_LENGTH}); split it"
            )
        stored = values.astype(self.dtype)
        if not np.array_equal(stored, values):
            raise DataError(
                f"document {self.num_documents} has values from {values.min()} to {values.max()}, which do "
                f"not fit into {self.dtype}; choose the dtype by the vocabulary size"
            )
        with self._writing(".bin"):
            self._bin.write(stored.tobytes())
        self._lengths.append(values.size)

    def add_side_file(self, suffix: str, content: bytes) -> None:
        """Write file PREFIX + suffix together with the dataset: it appears before the index, or not at all."""
        self._side_files[suffix] = content

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.complete()
                self._move_into_place()
        finally:
            with contextlib.suppress(OSError):  # flushing the buffer to a full disk fails, and does not matter
                self._bin.close()
            for suffix in (".bin", ".idx", *self._side_files):
                self._path(suffix + ".tmp").unlink(missing_ok=True)

    def complete(self) -> None:
        """Bring all files onto disk, still under temporary names; a clean exit calls this if nobody has.

        A caller that writes several datasets that belong together completes all before the first moves into place.
        """
        if self._is_complete:
            return
        if not self._lengths:
            raise DataError(f"no documents for {self.prefix}; check the inputs")
        with self._writing(".bin"):
            self._bin.flush()
            os.fsync(self._bin.fileno())
        for suffix, content in (*self._side_files.items(), (".idx", self._index_bytes())):
            with self._writing(suffix), self._temporary(suffix) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        self._is_complete = True

    def _move_into_place(self) -> None:
        # Remove an older index first, so that it never belongs to the new tokens.
        with self._writing(".idx"):
            self._path(".idx").unlink(missing_ok=True)
        for suffix in (".bin", *self._side_files, ".idx"):
            with self._writing(suffix):
                os.replace(self._path(suffix + ".tmp"), self._path(suffix))

    def _temporary(self, suffix: str) -> BinaryIO:
        return open(open_regular(self._path(suffix + ".tmp"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")

    def _writing(self, suffix: str) -> contextlib.AbstractContextManager[None]:
        return writing(self._path(suffix), DataError)

    def _index_bytes(self) -> bytes:
        lengths = np.array(self._lengths, dtype="<i8")
        pointers = (np.cumsum(lengths) - lengths) * self.dtype.itemsize
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        header = _HEADER.pack(MAGIC, VERSION, self._dtype_code, len(lengths), len(documents))
        arrays = (lengths.astype("<i4"), pointers, documents)
        return b"".join((header, *(array.tobytes() for array in arrays)))

    def _path(self, suffix: str) -> Path:
        return Path(f"{self.prefix}{suffix}")  # with_suffix would cut a prefix such as corpus.v1


class IndexedDataset:
    """Documents by index, read from the memory-mapped .bin file."""

    def __init__(self, prefix: str | Path, part: Part = WHOLE) -> None:
        """`part`: the share of documents to read; the others are invisible.

        Raises DataError, which names the file and both values, if a file is missing, of another format or truncated,
        and for a part without documents.
        """
        self.prefix = Path(prefix)
        index_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (index_path, bin_path):
            if not path.is_file():
                raise DataError(f"{path} does not exist; give the common prefix of a .bin and .idx pair")
        self.dtype, offsets = _read_index(index_path, bin_path.stat().st_size)
        expected_bytes = int(offsets[-1]) * self.dtype.itemsize
        if bin_path.stat().st_size != expected_bytes:
            raise DataError(
                f"{bin_path} has {bin_path.stat().st_size} bytes, but {index_path} describes "
                f"{expected_bytes}; one of them is truncated or from another build: build the dataset again"
            )
        if expected_bytes == 0:
            raise DataError(f"{bin_path} has 0 bytes; build the dataset from inputs that are not empty")
        # A plain view, because each slice of an np.memmap costs bookkeeping in Python.
        tokens = np.memmap(bin_path, dtype=self.dtype, mode="r").view(np.ndarray)
        documents = documents_of(part, len(offsets) - 1)
        if not documents:
            raise DataError(
                f"{prefix} has {len(offsets) - 1} documents, of which none is from {100 * part[0]:g} % to "
                f"{100 * part[1]:g} % of them: change --split, or build the corpus of more documents"
            )
        self.first_document = documents.start
        """Number in the file of document 0 of this part."""
        offsets = offsets[documents.start : documents.stop + 1]
        self._tokens, self._offsets = tokens[offsets[0] : offsets[-1]], offsets - offsets[0]
        self.document_lengths: NDArray[np.int64] = np.diff(self._offsets)
        """[number of documents], in tokens."""

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.document_lengths)

    def __getitem__(self, document: int) -> NDArray[Any]:
        """The tokens of one document: a read-only view of the file, shape [length], of self.dtype."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {self.prefix}, which has {len(self)}")
        return self._tokens[self._offsets[document] : self._offsets[document + 1]]

    def describe_content(self) -> str:
        """Numbers of documents and tokens, and a hash of document lengths and of slices of tokens all over the file.

        It distinguishes two corpora in any place without reading them whole.
        """
        digest = checksum()
        digest.update(f"{self.dtype.str}".encode())
        digest.update(self.document_lengths.astype("<i8").tobytes())
        for start in np.linspace(0, max(0, len(self._tokens) - _SLICE_TOKENS), _NUM_SLICES).astype(np.int64):
            digest.update(self._tokens[start : start + _SLICE_TOKENS].tobytes())
        return f"{len(self)} documents of {len(self._tokens)} tokens, {digest.hexdigest()}"


def _read_index(path: Path, bin_bytes: int) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Map and check an .idx file; returns the dtype and [D + 1] tokens at which documents begin, then their end."""
    source = Source(str(path), DataError, "build it again")
    with opened(path, source) as file:
        num_bytes, header = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
        if not header.startswith(MAGIC):
            raise DataError(f"{path} begins with {header[: len(MAGIC)]!r}, not {MAGIC!r}; it is no Megatron index")
        if num_bytes < _HEADER.size:
            raise DataError(f"{path} has {num_bytes} bytes, its header alone {_HEADER.size}; it is truncated")
        _, version, dtype_code, num_sequences, num_bounds = _HEADER.unpack(header)
        if version != VERSION:
            raise DataError(f"{path} has version {version}, this reader knows {VERSION}; convert it with Megatron-LM")
        if dtype_code not in DTYPE_CODES:
            raise DataError(f"{path} has dtype code {dtype_code}, known are {sorted(DTYPE_CODES)}; it is damaged")
        expected_bytes = _HEADER.size + 12 * num_sequences + 8 * num_bounds
        if num_bytes != expected_bytes:
            raise DataError(
                f"{path} has {num_bytes} bytes, but {num_sequences} sequences and {num_bounds} document "
                f"bounds need {expected_bytes}; it is truncated or of another kind (multimodal)"
            )
        if max(num_sequences, num_bounds) > _FREE_DOCUMENTS + bin_bytes:
            raise DataError(
                f"{path} has {num_sequences} sequences and {num_bounds} document bounds, but its .bin file only "
                f"{bin_bytes} bytes of tokens; it is damaged: build it again"
            )
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    dtype = DTYPE_CODES[dtype_code]
    lengths = np.frombuffer(content, "<i4", num_sequences, _HEADER.size)
    pointers = np.frombuffer(content, "<i8", num_sequences, _HEADER.size + num_sequences * 4)
    documents = np.frombuffer(content, "<i8", num_bounds, _HEADER.size + num_sequences * 12)
    ends = np.cumsum(lengths, dtype=np.int64)
    if (lengths < 0).any() or not np.array_equal(pointers, (ends - lengths) * dtype.itemsize):
        raise DataError(f"{path}: lengths and pointers disagree; sequences must lie end to end: build it again")
    is_whole = num_bounds > 0 and documents[0] == 0 and documents[-1] == num_sequences
    if not is_whole or (documents[1:] < documents[:-1]).any():  # compared, because a difference of int64 may overflow
        raise DataError(f"{path}: document bounds must rise from 0 to {num_sequences}; build it again")
    return dtype, np.concatenate((np.zeros(1, dtype=np.int64), ends))[documents]
