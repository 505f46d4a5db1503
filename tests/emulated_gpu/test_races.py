"""The race checker: silent where CUDA's rules order two accesses, loud where nothing does.

The pairs differ by one call. Reports do not depend on what really ran when, so each holds under every schedule; only a
question of the host (cudaEventQuery) is answered by what ran, and orders what follows where the answer is yes.
"""

import pytest
import torch

from memo.emulated_gpu.face import EmulatedGpu

NUM = 1024


def reports(gpu: EmulatedGpu) -> list[str]:
    """What was found so far, read and cleared."""
    torch.cuda.synchronize()
    found = sorted(gpu.races())
    gpu.clear()
    return found


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def write_then_read(side: torch.cuda.Stream, waits: bool) -> None:
    tensor = torch.zeros(NUM, device="cuda")
    torch.cuda.synchronize()
    tensor.fill_(1)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.sum()
    torch.cuda.synchronize()


def read_then_write(side: torch.cuda.Stream, waits: bool) -> None:
    tensor = torch.zeros(NUM, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        tensor.sum()
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    tensor.fill_(1)
    torch.cuda.synchronize()


def write_twice(side: torch.cuda.Stream, waits: bool) -> None:
    tensor = torch.zeros(NUM, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        tensor.fill_(1)
        event = side.record_event()
    if waits:
        event.synchronize()  # the host passes the order on
    tensor.fill_(2)
    torch.cuda.synchronize()


def reuse_early(side: torch.cuda.Stream, waits: bool) -> None:
    """A tensor made on one stream, used on another and freed: its block goes to the next request unless it is told."""
    tensor = torch.zeros(NUM, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.sum()
    if waits:
        tensor.record_stream(side)
    del tensor
    torch.zeros(NUM, device="cuda")
    torch.cuda.synchronize()


def copy_back_early(side: torch.cuda.Stream, waits: bool) -> None:
    """A copy to pinned memory on one stream and back on another."""
    tensor, host = torch.ones(NUM, device="cuda"), torch.empty(NUM, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()


def record_too_early(side: torch.cuda.Stream, waits: bool) -> None:
    """An event stands for the work before it, not for what came after."""
    tensor = torch.zeros(NUM, device="cuda")
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    event.record()
    tensor.fill_(1)
    if waits:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        tensor.sum()
    torch.cuda.synchronize()


def read_on_the_host_early(side: torch.cuda.Stream, waits: bool) -> None:
    tensor, host = torch.ones(NUM, device="cuda"), torch.empty(NUM, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    if waits:
        side.synchronize()
    host.sum()
    torch.cuda.synchronize()


def write_on_the_host_early(side: torch.cuda.Stream, waits: bool) -> None:
    host = torch.ones(NUM, pin_memory=True)
    with torch.cuda.stream(side):
        host.to("cuda", non_blocking=True)
    if waits:
        side.synchronize()
    host[: NUM // 2].add_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        (write_then_read, "read after write"),
        (read_then_write, "write after read"),
        (write_twice, "write after write"),
        (reuse_early, "write after read"),
        (copy_back_early, "read after write"),
        (record_too_early, "read after write"),
        (read_on_the_host_early, "read after write"),
        (write_on_the_host_early, "write after read"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_nothing_orders_is_told(any_schedule: EmulatedGpu, side: torch.cuda.Stream, scenario, kind: str) -> None:
    scenario(side, True)
    assert reports(any_schedule) == []
    scenario(side, False)
    found = reports(any_schedule)
    assert any(text.startswith(kind) for text in found), found


def test_bytes_that_do_not_overlap_do_not_race(gpu: EmulatedGpu, side: torch.cuda.Stream) -> None:
    matrix = torch.zeros(32, 32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        matrix[:, :16].fill_(1)  # every row's first half: strided
    matrix[:, 16:].fill_(2)
    assert reports(gpu) == []
    matrix[:, 15:17].fill_(3)
    with torch.cuda.stream(side):
        matrix[:, 16:].fill_(4)
    assert reports(gpu)


def test_reads_do_not_race(gpu: EmulatedGpu, side: torch.cuda.Stream) -> None:
    tensor = torch.zeros(NUM, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        tensor.sum()
    tensor.sum()
    assert reports(gpu) == []


def test_the_host_may_use_pinned_memory_beside_copies_of_other_bytes(gpu: EmulatedGpu, side: torch.cuda.Stream) -> None:
    """And it may look at tensors, take views and move them without touching an element."""
    host, other = torch.ones(NUM, pin_memory=True), torch.ones(NUM)
    with torch.cuda.stream(side):
        host[: NUM // 2].to("cuda", non_blocking=True)
        device = host.to("cuda", non_blocking=True)
    host[: NUM // 2].sum()  # two reads
    host.is_pinned(), host.view(2, -1).t(), torch.empty_like(host), host.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(device, non_blocking=True)
        host.to("cuda", non_blocking=True)  # the device reads it, in order
    other.add_(1)
    assert reports(gpu) == []
    with torch.cuda.stream(side):
        host[: NUM // 2].copy_(device[: NUM // 2], non_blocking=True)
    host[NUM // 2 :].add_(1)
    assert reports(gpu) == []


def test_waits_that_order_nothing_new_are_known(gpu: EmulatedGpu, side: torch.cuda.Stream) -> None:
    compute, unused = torch.cuda.current_stream(), torch.cuda.Event()
    tensor, other = torch.zeros(NUM, device="cuda"), torch.zeros(NUM, device="cuda")
    first = gpu.num_waits()
    event = compute.record_event()
    side.wait_event(event)
    with torch.cuda.stream(side):
        other.sum()
    side.wait_event(event)  # again
    tensor.fill_(1)
    early = compute.record_event()
    tensor.fill_(2)
    late = compute.record_event()
    side.wait_event(early)  # the next one covers it, and no work is between them
    side.wait_event(late)
    with torch.cuda.stream(side):
        other.sum()
    late.synchronize()
    late.synchronize()
    torch.cuda.Stream().wait_event(late)  # the host knows, and all that is issued from now on comes after
    torch.cuda.synchronize()
    unused.record()
    compute.wait_event(unused)  # of one's own stream
    tensor.sum()
    found = [gpu.is_wait_redundant(number) for number in range(first, first + 7)]
    assert found == [False, True, True, False, False, True, True]


@pytest.mark.parametrize("hidden", [{"waits": True}, {"recordings": True}], ids=["wait", "recording"])
def test_a_hidden_order_keeps_its_time_and_is_unknown_to_the_checker(
    any_schedule: EmulatedGpu, side: torch.cuda.Stream, hidden: dict[str, bool]
) -> None:
    """On this thread alone, and for streams as for the host."""
    tensor, host = torch.zeros(NUM, device="cuda"), torch.empty(NUM, pin_memory=True)
    torch.cuda.synchronize()
    tensor.fill_(1)
    with any_schedule.hidden(**hidden):
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    written = side.record_event()
    with any_schedule.hidden(waits=True):
        written.synchronize()
    assert host.sum() == NUM
    found = reports(any_schedule)
    assert [text.partition(":")[0] for text in found] == ["read after write"] * 2, found
    torch.cuda.current_stream().wait_stream(side)
    tensor.fill_(2)
    assert reports(any_schedule) == []


def test_a_race_that_eager_hides_changes_numbers_when_lazy(gpu: EmulatedGpu, side: torch.cuda.Stream) -> None:
    """Why there are schedules: the wait is missing in both, and the numbers tell in one."""
    sums = []
    for policy in ("eager", "lazy"):
        gpu.set_schedule(policy)
        tensor = torch.zeros(NUM, device="cuda")
        torch.cuda.synchronize()
        tensor.fill_(1)
        with torch.cuda.stream(side):
            total = tensor.sum()
        side.synchronize()
        with torch.cuda.stream(side):
            sums.append(total.item())
        torch.cuda.synchronize()
    assert sums == [NUM, 0]
    assert reports(gpu)
