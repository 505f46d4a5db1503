"""The arena of host records: exact size, pinning and its limits."""

import gc
import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memo.errors import HostMemoryError, ResourceError
from memo.executor import host_pool
from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
from memo.units import GIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_records_tile_one_arena_of_exact_size() -> None:
    pool = HostPool(5, 1000, CPU)
    records = [pool.record(index) for index in range(5)]
    start = records[0].data_ptr()
    assert start % mmap.PAGESIZE == 0
    assert [record.data_ptr() - start for record in records] == [0, 1000, 2000, 3000, 4000]
    assert all(record.shape == (1000,) and record.dtype == torch.uint8 for record in records)
    assert records[0].untyped_storage().nbytes() == pool.num_bytes == 5000
    for index, record in enumerate(records):
        record.fill_(index + 1)
    assert [int(pool.record(index).sum()) for index in range(5)] == [1000, 2000, 3000, 4000, 5000]


@pytest.mark.parametrize(("num_records", "record_bytes"), [(0, 1000), (3, 0), (0, 0)])
def test_pools_without_bytes(num_records: int, record_bytes: int) -> None:
    for device in (CPU, CUDA):  # nothing to pin, so no CUDA is needed
        pool = HostPool(num_records, record_bytes, device, HostBudget(0, "nothing"))
        assert pool.num_bytes == 0
        assert all(pool.record(index).numel() == 0 for index in range(num_records))
        pool.close()


@pytest.mark.parametrize("index", [-1, 2])
def test_records_outside_the_pool(index: int) -> None:
    with pytest.raises(IndexError, match=f"record {index} of 2"):
        HostPool(2, 8, CPU).record(index)


def test_records_outlive_their_pool() -> None:
    pool = HostPool(1, 8, CPU)
    record = pool.record(0)
    record.fill_(3)
    pool.close()
    del pool
    gc.collect()
    assert record.tolist() == [3] * 8


def test_the_arena_touches_its_pages_itself() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    pool = HostPool(16, 1 << 20, CPU)
    assert resident_bytes() - before > 15 << 20
    pool.close()
    assert resident_bytes() - before < 4 << 20


def test_pools_draw_on_one_budget_until_it_is_spent() -> None:
    budget = HostBudget(2 * GIB, "--offload-host-memory-gib 4, for 2 ranks of this node", is_limited=True)
    HostPool(1, GIB // 256, CPU, budget, "states")
    HostPool(2, GIB // 512, CPU, budget)
    with pytest.raises(HostMemoryError) as raised:
        HostPool(3, GIB, CPU, budget)
    assert str(raised.value) == (
        "activations in host memory need 3.00 GiB = 3 records x 1.00 GiB, but this rank may take 1.99 GiB besides "
        "8.00 MiB that it has taken, its part of --offload-host-memory-gib 4, for 2 ranks of this node: raise that "
        "flag, lower --offload-alpha, or use more pipeline stages or nodes"
    )
    assert isinstance(raised.value, ResourceError)
    assert budget.left_bytes == 2 * GIB - GIB // 128, "what was refused is not counted"


def test_a_mapping_that_the_system_refuses() -> None:
    with pytest.raises(
        HostMemoryError, match=r"this system refuses 1,073,741,824\.00 GiB.* available: lower --offload-alpha"
    ):
        HostPool(1 << 20, 1 << 40, CPU)


class FakeCudart:
    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: dict[int, int] = {}
        self.num_unregistered = 0
        self.waits: list[int] = []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        if self.status == 0:
            self.registered[pointer] = size
        return self.status

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        self.num_unregistered += 1
        return 0


@pytest.mark.parametrize("by", ["close", "dropping it"])
def test_pinned_while_it_lives(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    cudart = FakeCudart(0)
    cuda = SimpleNamespace(cudart=lambda: cudart, synchronize=lambda: cudart.waits.append(len(cudart.registered)))
    monkeypatch.setattr(torch, "cuda", cuda)
    pool = HostPool(3, 1000, CUDA)
    assert cudart.registered == {pool.record(0).data_ptr(): 3000}
    if by == "close":
        pool.close()
        pool.close()
    del pool
    gc.collect()
    assert cudart.registered == {} and cudart.num_unregistered == 1
    assert cudart.waits == [1]  # for copies, while it still was


class LimitedCudart(FakeCudart):
    """Refuses one call, the one with this number."""

    def __init__(self, refused: int) -> None:
        super().__init__(0)
        self.refused, self.num_calls = refused, 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.num_calls += 1
        return 2 if self.num_calls - 1 == self.refused else super().cudaHostRegister(pointer, size, flags)


def test_calls_that_pin_are_small_and_end_between_records_and_between_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = LimitedCudart(refused=-1)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: cudart, synchronize=lambda: None))
    monkeypatch.setattr(host_pool, "MOST_PINNED_BYTES", 20_000)
    pool = HostPool(21, 1536, CUDA)  # eight records of 1,536 bytes are three pages
    starts = [pool.record(index).data_ptr() for index in (0, 8, 16)]
    assert cudart.registered == dict(zip(starts, (8 * 1536, 8 * 1536, 5 * 1536), strict=True))
    pool.close()
    assert cudart.registered == {} and cudart.num_unregistered == 3


def test_what_was_pinned_before_a_refusal_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = LimitedCudart(refused=1)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: cudart, synchronize=lambda: None))
    monkeypatch.setattr(host_pool, "MOST_PINNED_BYTES", 4096)
    with pytest.raises(HostMemoryError, match=r"cannot pin 12\.00 KiB"):
        HostPool(3, 4096, CUDA)
    assert cudart.registered == {} and cudart.num_unregistered == 1


def test_pinning_that_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: FakeCudart(2)))
    with pytest.raises(HostMemoryError, match=r"cannot pin 2\.93 KiB .* returned 2\): raise the limit of locked"):
        HostPool(3, 1000, CUDA)


def test_the_arena_does_not_go_to_forked_children() -> None:
    """The first write after a fork would move a page away from where CUDA was told that it is."""
    pool = HostPool(4, 1 << 20, torch.device("cpu"))
    address = pool.record(0).data_ptr()
    flags: set[str] = set()
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            flags = set(line.split()[1:])
    assert "dc" in flags  # VM_DONTCOPY
