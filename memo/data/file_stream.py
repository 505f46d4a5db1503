"""Files as streams of bytes, packed ones unpacked on the way: a file of any size takes a buffer of memory."""

import contextlib
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from memo.artifacts.reading import Source, opened
from memo.data.arrow_tables import pyarrow
from memo.errors import MemoError

_MOST_PADDING_BYTES = 1 << 20
"""Zeros after a gzip file; those of a tape's block are a few thousand."""


@dataclass(frozen=True)
class FileStream:
    """A file that is being read."""

    file: BinaryIO
    """What is in it."""
    position: Callable[[], int]
    """Bytes of the file on disk that have been read."""
    num_bytes: int
    """Of the file on disk."""
    is_packed: bool


@contextlib.contextmanager
def open_stream(path: Path, source: Source) -> Iterator[FileStream]:
    """The content of a regular file; of .gz, .bz2, .xz and .zst what they pack.

    Raises source.error for a file that cannot be read or unpacked, also from inside, and ConfigError where .zst needs
    a package that is not there.
    """
    with opened(path, source) as raw:
        try:
            unpack = _UNPACKERS.get(path.suffix.lower(), lambda raw, _: contextlib.nullcontext(raw))
            with unpack(raw, path) as file:
                yield FileStream(file, raw.tell, os.fstat(raw.fileno()).st_size, file is not raw)
        except (MemoError, UnicodeDecodeError):
            raise
        except MemoryError:
            raise source.refusal("needs more memory to be unpacked than there is", "fetch or write it again") from None
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise source.refusal(f"cannot be read ({error})", "fetch or write it again") from None


class _LittlePadding:
    """A file that ends with few zeros: Python's gzip skips them one by one, and a sparse file has billions."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._num_zeros = raw, 0

    def read(self, size: int = -1) -> bytes:
        found = self._raw.read(size)
        self._num_zeros = self._num_zeros + 1 if found == b"\0" else 0
        if self._num_zeros > _MOST_PADDING_BYTES:
            raise OSError(f"more than {_MOST_PADDING_BYTES} zeros follow its end")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _bzip2(raw: BinaryIO, _: Path) -> BinaryIO:
    import bz2  # here, because some builds of Python lack it

    return cast(BinaryIO, bz2.BZ2File(raw))


def _zstandard(raw: BinaryIO, path: Path) -> BinaryIO:
    """Python has it from 3.14 on."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        packed = pyarrow(str(path)).PythonFile(raw, mode="r")
        return io.BufferedReader(pyarrow(str(path)).CompressedInputStream(packed, "zstd"), 1 << 20)
    return cast(BinaryIO, zstd.ZstdFile(raw))


_UNPACKERS: dict[str, Callable[[BinaryIO, Path], Any]] = {
    ".gz": lambda raw, _: gzip.GzipFile(fileobj=cast(BinaryIO, _LittlePadding(raw))),
    ".bz2": _bzip2,
    ".xz": lambda raw, _: lzma.LZMAFile(raw),  # noqa: SIM115  closed by open_stream
    ".zst": _zstandard,
}
