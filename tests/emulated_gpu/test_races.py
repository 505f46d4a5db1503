"""The race checker: silent where CUDA's rules order two accesses, loud where nothing does.

The pairs differ by one call. Reports do not depend on what really ran when, so each holds under every schedule.
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


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        (write_then_read, "read after write"),
        (read_then_write, "write after read"),
        (write_twice, "write after write"),
        (reuse_early, "write after read"),
        (copy_back_early, "read after write"),
        (record_too_early, "read after write"),
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
