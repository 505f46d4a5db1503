"""Memory, copies and errors, as the runtime's reference gives them, and torch's allocators over them."""

import ctypes

import pytest
import torch
from cuda_calls import (
    HOST_MEMORY_ALREADY_REGISTERED,
    HOST_MEMORY_NOT_REGISTERED,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    SUCCESS,
    Cuda,
)

from memo.emulated_gpu.face import EmulatedGpu
from memo.units import MIB

NUM_BYTES = 4096
GIB = 1 << 30


@pytest.fixture
def cuda(gpu: EmulatedGpu) -> Cuda:
    return Cuda()


def memory_info(cuda: Cuda) -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.ok("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def test_copies_from_pageable_memory_are_staged(cuda: Cuda, gpu: EmulatedGpu) -> None:
    """Reference, "API synchronization behavior": the source may change as soon as the call returns."""
    source, back = ctypes.create_string_buffer(b"a" * NUM_BYTES), ctypes.create_string_buffer(NUM_BYTES)
    device, stream = cuda.malloc(NUM_BYTES), cuda.stream()
    notes: list[str] = []
    cuda.note(stream, notes, "ran")
    assert cuda.copy(device, source, NUM_BYTES, stream) == SUCCESS
    ctypes.memset(source, ord("b"), NUM_BYTES)
    assert notes == []  # it did not wait
    assert cuda.copy(back, device, NUM_BYTES, stream) == SUCCESS
    assert back.raw[:NUM_BYTES] == b"a" * NUM_BYTES  # this one waited
    assert notes == ["ran"]
    assert gpu.counts()["copy to pageable memory"] == 1
    cuda.ok("cudaFree", device)


def test_copies_between_pinned_memory_and_the_device_do_not_wait(cuda: Cuda) -> None:
    host, device = cuda.malloc(NUM_BYTES, "cudaHostAlloc"), cuda.malloc(NUM_BYTES)
    stream = cuda.stream()
    ctypes.memset(host, ord("a"), NUM_BYTES)
    cuda.ok("cudaMemsetAsync", device, ord("b"), ctypes.c_size_t(NUM_BYTES), stream)
    assert cuda.copy(host, device, NUM_BYTES, stream) == SUCCESS
    assert ctypes.string_at(host, 1) == b"a"  # nothing ran
    cuda.ok("cudaStreamSynchronize", stream)
    assert ctypes.string_at(host, NUM_BYTES) == b"b" * NUM_BYTES
    cuda.ok("cudaFree", device)
    cuda.ok("cudaFreeHost", host)


def test_the_synchronous_copy_waits(cuda: Cuda) -> None:
    host, device = cuda.malloc(NUM_BYTES, "cudaHostAlloc"), cuda.malloc(NUM_BYTES)
    ctypes.memset(host, ord("a"), NUM_BYTES)
    cuda.ok("cudaMemcpy", device, host, ctypes.c_size_t(NUM_BYTES), 4)
    ctypes.memset(host, 0, NUM_BYTES)
    cuda.ok("cudaMemcpy", host, device, ctypes.c_size_t(NUM_BYTES), 4)
    assert ctypes.string_at(host, NUM_BYTES) == b"a" * NUM_BYTES
    cuda.ok("cudaFree", device)
    cuda.ok("cudaFreeHost", host)


def test_freeing_waits_for_the_device(cuda: Cuda) -> None:
    device, stream, notes = cuda.malloc(NUM_BYTES), cuda.stream(), list[str]()
    cuda.note(stream, notes, "ran")
    cuda.ok("cudaFree", device)
    assert notes == ["ran"]
    assert cuda.call("cudaFree", device) == INVALID_VALUE  # a second time
    assert cuda.call("cudaGetLastError") == INVALID_VALUE


def test_copies_beyond_an_allocation_are_refused(cuda: Cuda) -> None:
    device, host = cuda.malloc(2 * MIB), cuda.malloc(4 * MIB, "cudaHostAlloc")
    assert cuda.copy(device, host, 1 << 40) == INVALID_VALUE
    assert cuda.copy(host, device, 1 << 40) == INVALID_VALUE
    assert cuda.call("cudaMemsetAsync", device, 0, ctypes.c_size_t(1 << 40), None) == INVALID_VALUE
    cuda.ok("cudaFree", device)
    cuda.ok("cudaFreeHost", host)
    cuda.call("cudaGetLastError")


def test_host_memory_is_registered_once(cuda: Cuda) -> None:
    memory = ctypes.create_string_buffer(NUM_BYTES)
    size = ctypes.c_size_t(NUM_BYTES)
    cuda.ok("cudaHostRegister", memory, size, 0)
    assert cuda.call("cudaHostRegister", memory, size, 0) == HOST_MEMORY_ALREADY_REGISTERED
    cuda.ok("cudaHostUnregister", memory)
    assert cuda.call("cudaHostUnregister", memory) == HOST_MEMORY_NOT_REGISTERED
    assert cuda.call("cudaHostRegister", memory, ctypes.c_size_t(512 << 30), 0) == OUT_OF_MEMORY  # as drivers from r580
    cuda.call("cudaGetLastError")


def test_an_error_is_told_once(cuda: Cuda) -> None:
    """cudaPeekAtLastError leaves it, cudaGetLastError clears it."""
    pointer = ctypes.c_void_p()
    assert cuda.call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(1 << 60)) == OUT_OF_MEMORY
    assert cuda.call("cudaPeekAtLastError") == OUT_OF_MEMORY
    assert cuda.call("cudaGetLastError") == OUT_OF_MEMORY
    assert cuda.call("cudaGetLastError") == SUCCESS


def test_memory_ends_where_the_device_ends(cuda: Cuda) -> None:
    free, total = memory_info(cuda)
    assert total == 80 * GIB
    pointer = cuda.malloc(free)
    assert memory_info(cuda)[0] == 0
    more = ctypes.c_void_p()
    assert cuda.call("cudaMalloc", ctypes.byref(more), ctypes.c_size_t(1)) == OUT_OF_MEMORY
    cuda.ok("cudaFree", pointer)
    assert memory_info(cuda)[0] == free
    cuda.call("cudaGetLastError")


def test_managed_memory_is_not_bounded_by_the_device(cuda: Cuda) -> None:
    free, _ = memory_info(cuda)
    pointer = ctypes.c_void_p()
    cuda.ok("cudaMallocManaged", ctypes.byref(pointer), ctypes.c_size_t(100 * GIB), 1)
    assert memory_info(cuda)[0] == free
    cuda.ok("cudaFree", pointer)


def test_waits_of_the_host_are_told_as_they_happen(gpu: EmulatedGpu) -> None:
    told: list[str] = []
    tensor = torch.ones(3, device="cuda")
    gpu.on_synchronization(told.append)
    total = tensor.sum()
    assert told == []
    total.item()
    assert "cudaStreamSynchronize" in told
    gpu.on_synchronization(None)
    told.clear()
    torch.cuda.synchronize()
    assert told == []


# ---- torch's allocators


def test_torch_tells_out_of_memory_and_goes_on(gpu: EmulatedGpu) -> None:
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 80.00 GiB"):
        torch.empty(90 * GIB, dtype=torch.uint8, device="cuda")
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_blocks_are_used_again_in_the_order_of_their_stream(any_schedule: EmulatedGpu) -> None:
    """The caching allocator hands a freed block on at once: right on the same stream, whatever still runs."""
    first = torch.full((4 * MIB,), 1.0, device="cuda")
    address = first.data_ptr()
    total = first.sum()
    del first
    second = torch.full((4 * MIB,), 2.0, device="cuda")
    assert second.data_ptr() == address
    assert (total.item(), second.sum().item()) == (4 * MIB, 8 * MIB)


def test_record_stream_keeps_a_block_from_its_next_user(any_schedule: EmulatedGpu) -> None:
    side = torch.cuda.Stream()
    for _ in range(3):
        tensor = torch.full((4 * MIB,), 1.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = tensor.sum()
        tensor.record_stream(side)
        del tensor
        other = torch.full((4 * MIB,), 2.0, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert (total.item(), other.sum().item()) == (4 * MIB, 8 * MIB)


def test_pinned_tensors(any_schedule: EmulatedGpu) -> None:
    host = torch.arange(1000.0).pin_memory()
    assert host.is_pinned() and not torch.arange(3).is_pinned()
    device = host.to("cuda", non_blocking=True)
    back = torch.empty(1000, pin_memory=True)
    back.copy_(device * 2, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, host * 2)


def test_a_pinned_block_waits_for_the_copies_that_use_it(any_schedule: EmulatedGpu) -> None:
    """torch's pinned allocator records an event of each stream that a block was used on."""
    results = []
    for value in range(4):
        host = torch.full((MIB,), float(value), pin_memory=True)
        results.append(host.to("cuda", non_blocking=True))
        del host
    assert [tensor.sum().item() for tensor in results] == [float(value) * MIB for value in range(4)]
