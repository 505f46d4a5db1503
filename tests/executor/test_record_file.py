"""Records on a disk: they come back as they were, or one message says why not; and their file is never left behind."""

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import alone
from torch import Tensor

from memo.errors import DiskError
from memo.executor import record_file
from memo.executor.host_pool import HostPool
from memo.executor.record_file import RecordFile
from memo.spec.disk import BLOCK_BYTES, stride_bytes

CPU = torch.device("cpu")
RECORD_BYTES = 3 * BLOCK_BYTES - 8


def buffers(count: int = 2) -> list[Tensor]:
    pool = HostPool(count, stride_bytes(RECORD_BYTES), CPU)
    return [pool.record(index) for index in range(count)]


@contextmanager
def opened(directory: Path, num_records: int = 3) -> Iterator[RecordFile]:
    file = RecordFile(str(directory), num_records, RECORD_BYTES)
    try:
        yield file
    finally:
        file.close()


def without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)


def without_direct_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(file: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return real(file, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("piece_bytes", [BLOCK_BYTES, 2 * BLOCK_BYTES, 1 << 20])
def test_records_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool, direct: bool, piece_bytes: int
) -> None:
    monkeypatch.setattr(record_file, "PIECE_BYTES", piece_bytes)
    if not nameless:
        without_nameless_files(monkeypatch)
    if not direct:
        without_direct_transfers(monkeypatch)
    with opened(tmp_path) as file:
        assert list(tmp_path.iterdir()) == []
        assert direct or not file.is_direct
        assert file.num_bytes == 3 * stride_bytes(RECORD_BYTES) == 9 * BLOCK_BYTES
        out, back = buffers()
        for index in (2, 0, 1, 0):  # written again, a record holds what came last
            out.random_(0, 255, generator=torch.Generator().manual_seed(index))
            file.write(index, out)
        for index in (0, 1, 2):
            out.random_(0, 255, generator=torch.Generator().manual_seed(index))
            file.read(index, back)
            assert torch.equal(out, back)


def test_what_a_disk_takes_is_given_back(tmp_path: Path) -> None:
    with opened(tmp_path, num_records=1 << 12) as file:
        blocks = os.fstat(file._file).st_blocks * 512
        assert blocks >= file.num_bytes, "the file is not reserved in full"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._file)


def test_no_file_is_left_by_a_killed_process(tmp_path: Path) -> None:
    script = (
        "import sys, time, torch\n"
        "from memo.executor.host_pool import HostPool\n"
        "from memo.executor.record_file import RecordFile\n"
        "file = RecordFile(sys.argv[1], 8, 1 << 20)\n"
        "buffer = HostPool(1, 1 << 20, torch.device('cpu')).record(0)\n"
        "while True:\n"
        "    for index in range(8):\n"
        "        file.write(index, buffer)\n"
        "    print('written', flush=True)\n"
    )
    records, out = tmp_path / "records", tmp_path / "out"
    records.mkdir()
    out.mkdir()
    with alone(out, ("program", script), [str(records)]) as process:
        process.wait_until(lambda: "written" in process.output(0), "a record")
    assert process.ended(0).status == -signal.SIGKILL
    assert list(records.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("")
    with pytest.raises(DiskError, match=f"--offload-nvme-path {place} cannot hold records .*: give a directory"):
        RecordFile(str(place), 1, RECORD_BYTES)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DiskError, match=r"has no room for 4\.00 MiB of activations .* are free\): free some"):
            RecordFile(str(tmp_path), 4, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def fails_with(number: int, after: int) -> Any:
    """In the place of os.pwritev or os.preadv: fails from call `after` on."""
    calls = 0

    def call(*_: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(number, os.strerror(number))
        return RECORD_BYTES

    return call


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            errno.EIO,
            r"record 1 of 3 \(bytes 12288 to 24576 of the file\) cannot be written \(Input/output error\): look",
        ),
        (errno.ENOSPC, r"has no room for 36\.00 KiB of activations \(No space left on device"),
    ],
)
def test_a_failing_write_says_which_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    with opened(tmp_path) as file:
        monkeypatch.setattr(os, "pwritev", fails_with(number, 0))
        with pytest.raises(DiskError, match=message):
            file.write(1, buffers()[0])


def test_a_failing_read_says_which_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as file:
        file.write(2, buffers()[0])
        monkeypatch.setattr(os, "preadv", fails_with(errno.EIO, 0))
        with pytest.raises(DiskError, match=r"record 2 of 3 .* cannot be read \(Input/output error\)"):
            file.read(2, buffers()[0])


@pytest.mark.parametrize("direct", [True, False])
def test_a_transfer_in_parts_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        without_direct_transfers(monkeypatch)
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: pwritev(file, [parts[0][:BLOCK_BYTES]], at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:BLOCK_BYTES]], at))
    with opened(tmp_path) as file:
        out, back = buffers()
        out.random_(0, 255)
        file.write(0, out)
        file.read(0, back)
        assert torch.equal(out, back)


def test_a_short_read_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.write(2, buffers()[0])
        os.ftruncate(file._file, 8 * BLOCK_BYTES)
        with pytest.raises(DiskError, match=r"of record 2 of 3 .*, 8192 bytes were read: look at the disk's log"):
            file.read(2, buffers()[0])


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        out, back = buffers()
        file.write(0, out)
        file.write(1, out)
        out[2 * BLOCK_BYTES] ^= 1
        view = memoryview(out.numpy())[2 * BLOCK_BYTES :]
        os.pwritev(file._file, [view], file.stride_bytes + 2 * BLOCK_BYTES)
        file.read(0, back)
        with pytest.raises(DiskError, match=r"record 1 of 3 .* has checksum \w{16}, but \w{16} was written"):
            file.read(1, back)


def test_a_buffer_that_cannot_be_transferred_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        (buffer,) = buffers(1)
        for wrong in (buffer[:-8], torch.empty(stride_bytes(RECORD_BYTES) + 8, dtype=torch.uint8)[8:]):
            with pytest.raises(ValueError, match="does not suit"):
                file.write(0, wrong)
        with pytest.raises(IndexError, match="record 3 of 3"):
            file.write(3, buffer)
