"""Compares steps of the swap engine with records on a disk with the sequential rate of the disk.

    python benchmarks/disk_records.py --folder DIR

A step of the engine offloads every record through staging buffers to the disk and brings all of them back, with
checksums. Layers compute nothing, so the step takes the time of the disk and the overhead of the engine. It is compared
with the time in which the disk writes and reads as many bytes in order: the same reserved file and direct transfers of
the same size, without buffers, events or checksums, by one thread or two threads, whichever is faster. Both take turns
`--repeats` times, and medians are compared. The ratio must be at least 0.8; exit status 1 if it is not. Slots are in
host memory: a GPU's copies would run beside the transfers, on a link of their own.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import rows
import torch

from memo.executor import record_file
from memo.executor.cpu_streams import ThreadStreams
from memo.executor.disk_budget import DiskBudget
from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
from memo.executor.host_records import HostRecords
from memo.executor.record_file import RecordFile
from memo.executor.swapper import Swapper
from memo.planner.disk_plan import disk_plan
from memo.planner.swap import swap_plan
from memo.spec.disk import NUM_BUFFERS
from memo.spec.layer_ops import stage_ops
from memo.spec.schedule import Pipeline
from memo.units import MIB

LEAST_RATIO = 0.8
CPU = torch.device("cpu")


class Engine:
    """One stage with all records on disk; its layers compute nothing."""

    def __init__(self, folder: Path, num_records: int, record_bytes: int) -> None:
        self.plan = swap_plan(stage_ops(Pipeline(1, 1, 1), 0, num_records + 2))  # the last two layers stay
        assert self.plan.num_records == num_records
        self.backend = ThreadStreams()
        budget = HostBudget(sys.maxsize, "a benchmark", disk=DiskBudget(str(folder), sys.maxsize))
        places = disk_plan(self.plan, num_records, NUM_BUFFERS)
        records = HostRecords(self.plan, record_bytes, CPU, self.backend, budget, places)
        assert records.file is not None
        self.file = records.file
        slots = HostPool(self.plan.num_slots, record_bytes, CPU)
        self.slots = [slots.record(index).random_(0, 255) for index in range(self.plan.num_slots)]
        self.swapper = Swapper(self.plan, self.slots, record_bytes, records, self.backend)

    def step_s(self) -> float:
        begin_s = time.perf_counter()
        for step in self.plan.steps:
            self.swapper.begin(step.op.kind, step.op.layer)
            self.swapper.end(step.op.kind, step.op.layer)
        self.swapper.next_step()
        self.backend.synchronize()
        return time.perf_counter() - begin_s

    def close(self) -> None:
        self.backend.close()
        self.file.close()


def sequential_s(file: RecordFile, call: Any, num_threads: int, buffer: torch.Tensor) -> float:
    """Return the seconds in which the disk moves all bytes of a file in order, in pieces from or to one buffer."""
    piece = buffer.numpy().data

    def transfer(start: int) -> None:
        length = min(len(piece), file.num_bytes - start)
        assert call(file._file, [piece[:length]], start) == length

    with ThreadPoolExecutor(num_threads) as threads:
        begin_s = time.perf_counter()
        list(threads.map(transfer, range(0, file.num_bytes, len(piece))))
        return time.perf_counter() - begin_s


def measure(folder: Path, num_records: int, record_bytes: int, repeats: int) -> dict[str, Any]:
    """Return one row with the medians of the engine and of the bare disk."""
    buffer = HostPool(1, min(record_file.PIECE_BYTES, record_bytes), CPU).record(0).random_(0, 255)
    steps_s: list[float] = []
    alone_s: dict[tuple[str, int], list[float]] = {}
    with closing(Engine(folder, num_records, record_bytes)) as engine:
        engine.step_s()  # the first writes of a reserved file cost more
        for _ in range(repeats):
            for name, call in (("write", os.pwritev), ("read", os.preadv)):
                for num_threads in (1, 2):
                    taken_s = sequential_s(engine.file, call, num_threads, buffer)
                    alone_s.setdefault((name, num_threads), []).append(taken_s)
            steps_s.append(engine.step_s())
        num_bytes, is_direct = engine.file.num_bytes, engine.file.is_direct
    quickest = {
        name: min(statistics.median(alone_s[name, num_threads]) for num_threads in (1, 2)) for name in ("write", "read")
    }
    step_s = statistics.median(steps_s)
    return {
        "records": num_records,
        "record_bytes": record_bytes,
        "repeats": repeats,
        "direct": is_direct,
        "disk_write_gb_per_s": num_bytes / quickest["write"] / 1e9,
        "disk_read_gb_per_s": num_bytes / quickest["read"] / 1e9,
        "disk_s": sum(quickest.values()),
        "step_s": step_s,
        "steps_s": steps_s,
        "ratio": sum(quickest.values()) / step_s,
        "least_ratio": LEAST_RATIO,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a directory of the disk")
    parser.add_argument("--records", type=int, default=16)
    parser.add_argument("--mib", type=int, default=128, help="of a record")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    row = measure(given.folder, given.records, given.mib * MIB, given.repeats)
    print(
        f"the disk writes {row['disk_write_gb_per_s']:.2f} GB/s and reads {row['disk_read_gb_per_s']:.2f}: "
        f"{row['disk_s']:.2f} s; a step takes {row['step_s']:.2f} s: ratio {row['ratio']:.2f}"
    )
    print(f"kept in {rows.write('disk_records', [row])}")
    return int(row["ratio"] < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
