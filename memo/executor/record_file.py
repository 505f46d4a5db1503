"""Records of activations on a disk: one file without a name, reserved in full before the first step.

A file without a name vanishes with the process that opened it, however the process ends, so nothing needs to be cleaned
up. Records bypass the page cache where the file system allows it: each record is read only once, and the cache would
take the host memory that the disk is to save. A record is cut into pieces, so that one piece is transferred while the
checksum of the next is computed.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from memo.artifacts.checksum import checksum_of
from memo.errors import DiskError
from memo.spec.disk import BLOCK_BYTES, stride_bytes
from memo.units import MIB, format_bytes

PIECE_BYTES = 32 * MIB
"""Bytes per write or read. On a virtual disk of 5 GB/s, calls of 8 MiB reached 2.4 GB/s and calls of 32 MiB 4.4."""
_THREADS = 2
"""Pieces that are transferred or hashed at once; more threads were no faster."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""Errors of file systems and old kernels that do not support files without a name."""


class RecordFile:
    """`num_records` records of `record_bytes` bytes each, in a file in `directory`.

    Buffers are flat uint8 tensors on the host of `stride_bytes` bytes, at addresses that are multiples of BLOCK_BYTES.

    Raises DiskError if the directory cannot be used, or its file system has less room.
    """

    def __init__(self, directory: str, num_records: int, record_bytes: int) -> None:
        self.directory, self.num_records, self.record_bytes = directory, num_records, record_bytes
        self.stride_bytes = stride_bytes(record_bytes)
        self._checksums: dict[int, list[str]] = {}
        self._file = open_nameless(directory)
        try:
            self._reserve()
            self.is_direct = _turn_direct(self._file)
        except BaseException:
            os.close(self._file)
            raise
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="memo-disk")
        self._close = weakref.finalize(self, _close, self._threads, self._file)

    @property
    def num_bytes(self) -> int:
        """Bytes that the file takes on the disk."""
        return self.num_records * self.stride_bytes

    def write(self, index: int, buffer: Tensor) -> None:
        """Write a record. Raises DiskError if the disk does not take all of it."""
        view = self._view(index, buffer)

        def piece(start: int) -> str:
            part = view[start : start + PIECE_BYTES]
            self._transfer("written", os.pwritev, index, start, part)
            return checksum_of(part)

        self._checksums[index] = list(self._threads.map(piece, range(0, self.stride_bytes, PIECE_BYTES)))
        if not self.is_direct:  # the cache must not grow, and errors of the disk must show now
            with self._failing("written", index, 0, self.stride_bytes):
                os.fdatasync(self._file)
                os.posix_fadvise(self._file, *self._place(index), os.POSIX_FADV_DONTNEED)

    def read(self, index: int, buffer: Tensor) -> None:
        """Read a record that was written. Raises DiskError if that fails, or if its checksum has changed."""
        view, expected = self._view(index, buffer), self._checksums[index]

        def piece(start: int) -> None:
            part = view[start : start + PIECE_BYTES]
            self._transfer("read", os.preadv, index, start, part)
            found = checksum_of(part)
            if found != expected[start // PIECE_BYTES]:
                self._fail(
                    f"{self._name(index, start, len(part))} has checksum {found}, but {expected[start // PIECE_BYTES]} "
                    "was written: the disk or memory has changed bytes"
                )

        list(self._threads.map(piece, range(0, self.stride_bytes, PIECE_BYTES)))
        if not self.is_direct:
            os.posix_fadvise(self._file, *self._place(index), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the disk's space back, after the last write and read; also done when the object is garbage-collected."""
        self._close()

    def _reserve(self) -> None:
        if not self.num_bytes:
            return
        try:
            os.posix_fallocate(self._file, 0, self.num_bytes)
        except OSError as error:
            raise _no_room(self.directory, self.num_bytes, error) from None

    def _transfer(
        self, verb: str, call: Callable[[int, list[memoryview], int], int], index: int, start: int, part: memoryview
    ) -> None:
        """Write or read a piece, in as many calls as the system needs."""
        offset, done = self._place(index)[0] + start, 0
        while done < len(part):
            with self._failing(verb, index, start, len(part)):
                moved = call(self._file, [part[done:]], offset + done)
            if moved == 0 or (self.is_direct and moved % BLOCK_BYTES):
                self._fail(f"of {self._name(index, start, len(part))}, {done + moved} bytes were {verb}")
            done += moved

    @contextlib.contextmanager
    def _failing(self, verb: str, index: int, start: int, length: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise _no_room(self.directory, self.num_bytes, error) from None
            self._fail(f"{self._name(index, start, length)} cannot be {verb} ({error.strerror})")

    def _fail(self, what: str) -> NoReturn:
        raise DiskError(
            f"--offload-nvme-path {self.directory}: {what}: look at the disk's log (dmesg, smartctl), and continue "
            "from the last checkpoint with another directory, or without the flag"
        )

    def _name(self, index: int, start: int, length: int) -> str:
        begin = self._place(index)[0] + start
        return f"record {index} of {self.num_records} (bytes {begin} to {begin + length} of the file)"

    def _place(self, index: int) -> tuple[int, int]:
        """Offset and length in the file."""
        return index * self.stride_bytes, self.stride_bytes

    def _view(self, index: int, buffer: Tensor) -> memoryview:
        if not 0 <= index < self.num_records:
            raise IndexError(f"record {index} of {self.num_records}")
        if buffer.nbytes != self.stride_bytes or buffer.data_ptr() % BLOCK_BYTES:
            raise ValueError(f"a buffer of {buffer.nbytes} bytes at {buffer.data_ptr():#x} does not suit this file")
        return buffer.numpy().data


def _close(threads: ThreadPoolExecutor, file: int) -> None:
    threads.shutdown(wait=False)  # all transfers have ended: each held a reference to the RecordFile
    os.close(file)


def open_nameless(directory: str) -> int:
    """Open a new file without a name, or remove its name at once; returns the file descriptor.

    Raises DiskError if the directory cannot hold such a file.
    """
    try:
        try:
            return os.open(directory, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _NO_NAMELESS or not Path(directory).is_dir():
                raise
        file, name = tempfile.mkstemp(prefix=".memo-records-", dir=directory)
        os.unlink(name)
        return file
    except OSError as error:
        raise DiskError(
            f"--offload-nvme-path {directory} cannot hold records ({error.strerror}): give a directory of a local disk "
            "that exists, and in which you may write"
        ) from None


def _turn_direct(file: int) -> bool:
    """Make reads and writes bypass the page cache; returns False if the file system cannot do that."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK_BYTES) as block:  # some file systems accept the flag and refuse the first transfer
            os.preadv(file, [memoryview(block)], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


def _no_room(directory: str, num_bytes: int, error: OSError) -> DiskError:
    system = os.statvfs(directory)
    return DiskError(
        f"--offload-nvme-path {directory} has no room for {format_bytes(num_bytes)} of activations ({error.strerror}; "
        f"{format_bytes(system.f_bavail * system.f_frsize)} are free): free some, give another directory, lower "
        "--offload-alpha, or use more pipeline stages or nodes"
    )
