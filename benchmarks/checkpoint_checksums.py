"""Measures the time that checksums add to saving and loading a checkpoint; the bound is 10 % of a save.

    python benchmarks/checkpoint_checksums.py --folder DIR

One rank saves and loads `--mib` of fp32, in tensors of 64 MiB, with and without checksums in turn, `--repeats` times.
The shortest times are compared, because other processes only add to them. A row has CPU seconds beside clock seconds.
DIR decides the result: the faster its disk, the larger the share of checksums; a disk in memory (/dev/shm), where fsync
costs nothing, is the fastest. Exit status: 1 if the bound is not met. Run it on an idle machine.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rows
import torch

from memo.checkpoint import writer
from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import open_checkpoint, read_tensors, write_tensors
from memo.units import MIB

BOUND_PERCENT = 10.0
TENSOR_BYTES = 64 * MIB


class NoChecksum:
    """A checksum that computes nothing."""

    def update(self, data: object) -> None:
        """Ignore the data."""

    def hexdigest(self) -> str:
        return ""


@contextmanager
def without_checksums() -> Iterator[None]:
    """Let saves within the context compute no checksums of tensors."""
    real, writer.checksum = writer.checksum, NoChecksum  # type: ignore[assignment]
    try:
        yield
    finally:
        writer.checksum = real


def save_and_load(folder: Path, tensors: dict[str, GlobalTensor], *, checksums: bool) -> tuple[float, float, float]:
    """Return the seconds of one save, its CPU seconds, and the seconds of one load with the files in the page cache."""
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    if checksums:
        final = write_tensors(folder, RunState(1, 0, 0, 0, 0, 0), tensors)
    else:
        with without_checksums():
            final = write_tensors(folder, RunState(1, 0, 0, 0, 0, 0), tensors)
    saved_s, cpu_s = time.perf_counter(), time.thread_time() - start_cpu_s
    read_tensors(final, open_checkpoint(final, verify=checksums)[1], tensors, verify=checksums)
    return saved_s - start_s, cpu_s, time.perf_counter() - saved_s


def measure(folder: Path, num_bytes: int, repeats: int) -> dict[str, Any]:
    """Return one row: the shortest times with and without checksums, and the difference."""
    count = max(1, num_bytes // TENSOR_BYTES)
    tensors = {f"master/{i}": GlobalTensor.whole(torch.rand(TENSOR_BYTES // 4096, 1024)) for i in range(count)}
    times_s: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    for repeat in range(repeats):
        for checksums in (True, False) if repeat % 2 else (False, True):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                times_s[checksums].append(save_and_load(Path(place), tensors, checksums=checksums))
    save_s, save_cpu_s, load_s = (min(column) for column in zip(*times_s[True], strict=True))
    bare_save_s, bare_save_cpu_s, bare_load_s = (min(column) for column in zip(*times_s[False], strict=True))
    return {
        "bytes": count * TENSOR_BYTES,
        "repeats": repeats,
        "file_system_free_bytes": shutil.disk_usage(folder).free,
        "save_s": save_s,
        "save_without_s": bare_save_s,
        "save_cpu_s": save_cpu_s,
        "save_without_cpu_s": bare_save_cpu_s,
        "load_s": load_s,
        "load_without_s": bare_load_s,
        "added_to_save_percent": 100.0 * (save_s / bare_save_s - 1.0),
        "added_to_load_percent": 100.0 * (load_s / bare_load_s - 1.0),
        "bound_percent": BOUND_PERCENT,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints are written"
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=7, help="saves and loads of each kind")
    given = parser.parse_args()
    row = measure(given.folder, given.mib * MIB, given.repeats)
    for what in ("save", "load"):
        print(
            f"{what}: {row[f'{what}_s']:.3f} s with checksums, {row[f'{what}_without_s']:.3f} s without: "
            f"{row[f'added_to_{what}_percent']:+.1f} %"
        )
    print(f"kept in {rows.write('checkpoint_checksums', [row])}")
    return int(row["added_to_save_percent"] > BOUND_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
