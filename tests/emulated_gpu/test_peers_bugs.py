"""Races that other projects shipped, each in a few lines: told under every schedule, and its mended twin never.

Each scenario is named after the issue or pull request on GitHub that tells of the bug. It returns a number that the
mended twin gets right; what the broken one gets depends on the schedule, so it is asked only for its race.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, distributed
from torch.cuda import Event, Stream, current_stream

from memo.emulated_gpu.face import EmulatedGpu

NUM = 1 << 18  # elements: 1 MiB, so that the allocator gives each tensor a block of its own

Scenario = Callable[[bool], Tensor]
SCENARIOS: dict[str, tuple[float, str, Scenario]] = {}
"""By source: the mended result, the kind of race, and what runs."""


def bug(source: str, result: float, race: str) -> Callable[[Scenario], Scenario]:
    def note(scenario: Scenario) -> Scenario:
        SCENARIOS[source] = result, race, scenario
        return scenario

    return note


def full(value: float) -> Tensor:
    return torch.full((NUM,), value, device="cuda")


def pinned() -> Tensor:
    return torch.zeros(NUM, pin_memory=True)


@bug("NVIDIA/Megatron-LM#7398", 1.0, "read after write: copy device to host")
def reload_without_its_offload(is_mended: bool) -> Tensor:
    """A group that nobody prefetched is reloaded on the compute stream, which never waited for its offload."""
    compute, offload, record = current_stream(), Stream(), pinned()
    activation = full(1.0)
    offload.wait_stream(compute)
    with torch.cuda.stream(offload):
        record.copy_(activation, non_blocking=True)
        offloaded = offload.record_event()
    if is_mended:
        compute.wait_event(offloaded)
    return record.to("cuda", non_blocking=True).mean()


@bug("huggingface/trl#7195", 1.0, "read after write: aten::copy_")
def clone_behind_the_snapshot(is_mended: bool) -> Tensor:
    """The transfer stream waits for compute, and only then is the saved view cloned there."""
    compute, transfer, record = current_stream(), Stream(), pinned()
    saved = full(1.0)
    if is_mended:
        clone = saved[1:].clone()
        transfer.wait_stream(compute)
    else:
        transfer.wait_stream(compute)
        clone = saved[1:].clone()
    with torch.cuda.stream(transfer):
        record[1:].copy_(clone, non_blocking=True)
    transfer.synchronize()
    return record[1:].mean()


@bug("pytorch/torchtitan#2581", 3.0, "read after write: aten::fill_")
def wait_for_oneself(is_mended: bool) -> Tensor:
    """Inside `with stream(s)` the current stream is s itself, so the wait for "compute" orders nothing."""
    compute, offload, prefetch, slab = current_stream(), Stream(), Stream(), pinned()
    total = torch.zeros((), device="cuda")
    for step in (1, 2):
        activation = full(float(step))
        with torch.cuda.stream(offload):
            offload.wait_stream(compute if is_mended else current_stream())
            slab.copy_(activation, non_blocking=True)
        activation.record_stream(offload)
        prefetch.wait_stream(offload)
        with torch.cuda.stream(prefetch):
            back = slab.to("cuda", non_blocking=True)
        compute.wait_stream(prefetch)
        back.record_stream(compute)
        total += back.mean()
    return total


@bug("pytorch/pytorch#180665", 1.0, "write after read: copy device to host")
def freed_while_another_stream_reads(is_mended: bool) -> Tensor:
    """A reduced gradient is freed while a second stream offloads it; its block goes to the next reduction."""
    reduction, post, host = Stream(), Stream(), pinned()
    with torch.cuda.stream(reduction):
        reduced = full(1.0)
    post.wait_stream(reduction)
    with torch.cuda.stream(post):
        host.copy_(reduced, non_blocking=True)
        offloaded = post.record_event()
    kept = reduced if is_mended else None
    del reduced
    with torch.cuda.stream(reduction):
        if is_mended:
            reduction.wait_event(offloaded)
        del kept
        full(2.0)
    post.synchronize()
    return host.mean()


@bug("pytorch/pytorch#180666", -1.0, "read after write: copy device to host")
def hook_reads_too_early(is_mended: bool) -> Tensor:
    """A hook updates weights on the CPU from a gradient whose copy to pinned memory is still under way."""
    compute, post, gradient_on_host = current_stream(), Stream(), pinned()
    weight = torch.zeros(NUM)
    gradient = full(1.0)
    post.wait_stream(compute)
    with torch.cuda.stream(post):
        gradient_on_host.copy_(gradient, non_blocking=True)
        arrived = post.record_event()
    if is_mended:
        arrived.synchronize()
    weight.add_(gradient_on_host, alpha=-1)
    post.synchronize()
    return weight.mean()


@bug("pytorch/ao#584", 2.0, "read after write: aten::")
def gradient_read_beside_backward(is_mended: bool) -> Tensor:
    """The stream that takes gradients to the host does not wait for the backward that computes them."""
    transfer, host = Stream(), pinned()
    weight = full(1.0).requires_grad_()
    torch.cuda.synchronize()

    def offload(parameter: Tensor) -> None:
        if is_mended:
            transfer.wait_stream(current_stream())
        assert parameter.grad is not None
        with torch.cuda.stream(transfer):
            host.copy_(parameter.grad, non_blocking=True)

    weight.register_post_accumulate_grad_hook(offload)
    (weight * weight).sum().backward()
    transfer.synchronize()
    return host.mean()


@bug("deepspeedai/DeepSpeed#5606", 6.0, "write after")
def bucket_filled_during_its_reduction(is_mended: bool) -> Tensor:
    """Of two buckets, the next is filled again while the collective on the reduction stream still has it."""
    compute, reduction = current_stream(), Stream()
    buckets = [full(0.0), full(0.0)]
    total = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    for step in range(4):
        if is_mended:
            compute.wait_stream(reduction)
        bucket = buckets[step % 2].fill_(float(step))
        reduction.wait_stream(compute)
        with torch.cuda.stream(reduction):
            distributed.all_reduce(bucket)
            total += bucket.mean()
    reduction.synchronize()
    return total


@bug("AcademySoftwareFoundation/openvdb#2287", 2.0, "write after read: aten::mean")
def event_recorded_again(is_mended: bool) -> Tensor:
    """One event stands for all uses of a buffer; its second recording forgets the stream of the first."""
    compute, first, second, used = current_stream(), Stream(), Stream(), Event()
    buffer = full(1.0)
    used.record()
    means = []
    for stream in (first, second):
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            means.append(buffer.mean())
        if is_mended:
            stream.wait_event(used)  # so that the next recording stands for the last one, too
        used.record(stream)
    compute.wait_event(used)
    buffer.zero_()
    torch.cuda.synchronize()
    total = means[0] + means[1]
    torch.cuda.synchronize()  # both belong to other streams, which may use their memory again once they are freed
    return total


@bug("NVIDIA/cuCascade#158", 1.0, "write after read: copy host to device")
def slab_given_on_during_its_copy(is_mended: bool) -> Tensor:
    """A pool of pinned slabs hands one to another stream while a copy still reads it."""
    compute, first, second, slab = current_stream(), Stream(), Stream(), pinned()
    slab.fill_(1.0)
    with torch.cuda.stream(first):
        up = slab.to("cuda", non_blocking=True)
        freed = first.record_event()
    other = full(2.0)
    second.wait_stream(compute)
    with torch.cuda.stream(second):
        if is_mended:
            second.wait_event(freed)
        slab.copy_(other, non_blocking=True)
    torch.cuda.synchronize()
    mean = up.mean()
    torch.cuda.synchronize()  # `up` belongs to another stream, which may use its memory again once it is freed
    return mean


@bug("pytorch/pytorch#127612", 1.0, "write after read: copy host to device")
def source_changed_under_its_copy(is_mended: bool) -> Tensor:
    """The CPU writes to a pinned tensor right after a copy that does not block was issued from it."""
    source = pinned().fill_(1.0)
    up = source.to("cuda", non_blocking=True)
    if is_mended:
        current_stream().synchronize()
    source.fill_(-1.0)
    return up.mean()


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("source", SCENARIOS)
def test_the_race_is_told_and_its_mended_twin_is_silent(any_schedule: EmulatedGpu, source: str) -> None:
    expected, race, scenario = SCENARIOS[source]
    assert scenario(True).item() == expected  # small whole numbers: exact in fp32
    torch.cuda.synchronize()
    assert not any_schedule.races()
    scenario(False)
    torch.cuda.synchronize()
    found = sorted(any_schedule.races())
    any_schedule.clear()
    assert any(text.startswith(race) for text in found), found
