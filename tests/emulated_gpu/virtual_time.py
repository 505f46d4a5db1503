"""A program on a timed emulated GPU: seconds of virtual time that small pieces of work take, as JSON.

What a schedule cannot change is all of it: every number here is the same under each.
"""

import json
import time
from collections.abc import Callable

import torch
from cuda_calls import BLOCKING, Cuda

SLEEP_S = 1e-3
NUM_BYTES = 64 << 20
SIZE = 4096
ROWS = 1024
MANY = 50


def sleep() -> None:
    torch.cuda._sleep(int(SLEEP_S * 2e9))


def seconds(work: Callable[[], object]) -> float:
    """Until the device has nothing left to do, by the host's clock."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def on(stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
    with torch.cuda.stream(stream):
        work()


def measured() -> dict[str, object]:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    blocking = torch.cuda.ExternalStream(Cuda().stream(BLOCKING).value)
    a = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    device = [torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(NUM_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    small = torch.ones(8, device="cuda")
    indices, rows = torch.arange(ROWS, device="cuda"), a[:ROWS].clone()

    def up(i: int) -> None:
        device[i].copy_(host[i], non_blocking=True)

    def down(i: int) -> None:
        host[i].copy_(device[i], non_blocking=True)

    def both(one: Callable[[], object], other: Callable[[], object]) -> float:
        return seconds(lambda: (on(first, one), on(second, other)))

    def many(after_each: Callable[[], object]) -> float:
        return seconds(lambda: [(torch.add(small, 1, out=small), after_each()) for _ in range(MANY)])

    return {
        "sleeps of two streams": both(sleep, sleep),
        "sleeps of one stream": seconds(lambda: (sleep(), sleep())),
        "one product": seconds(lambda: a @ a),
        "products of two streams": both(lambda: a @ a, lambda: a @ a),
        "one copy up": seconds(lambda: up(0)),
        "copies up of two streams": both(lambda: up(0), lambda: up(1)),
        "copies up and down": both(lambda: up(0), lambda: down(1)),
        "copy under a product": both(lambda: up(0), lambda: a @ a),
        "copy within the device": seconds(lambda: device[0].copy_(device[1])),
        "rows of a table": seconds(lambda: a.index_select(0, indices)),
        "added to rows of a table": seconds(lambda: a.index_add_(0, indices, rows)),
        "a stream that waits": seconds(lambda: waits(first, second)),
        "the legacy stream and a blocking one": seconds(lambda: (sleep(), on(blocking, sleep))),
        "many kernels": many(lambda: None),
        "many kernels, each waited for": many(torch.cuda.synchronize),
        "queued, not waited for": queued(),
        "between events": between_events(),
        "answers": answers(first, second),
        "a loop of questions": seconds(ask),
    }


def waits(first: torch.cuda.Stream, second: torch.cuda.Stream) -> None:
    on(first, sleep)
    second.wait_stream(first)
    on(second, sleep)
    on(first, sleep)  # nobody waits for it


def queued() -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    sleep()
    taken_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    return taken_s


def between_events() -> float:
    """Behind other work, so that the host is ahead of the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sleep()
    begin.record()
    sleep()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def answers(first: torch.cuda.Stream, second: torch.cuda.Stream) -> list[bool]:
    """Of an event and its stream: at once; when the host has waited for something shorter; and for something longer."""
    event, found = torch.cuda.Event(), list[bool]()
    for _ in range(2):
        on(first, sleep)
    event.record(first)
    for seconds_more in range(3):
        found += [event.query(), first.query()]
        on(second, sleep)
        if seconds_more < 2:
            second.synchronize()
    torch.cuda.synchronize()
    return found


def ask() -> None:
    event = torch.cuda.Event()
    sleep()
    event.record()
    while not event.query():
        pass


if __name__ == "__main__":
    print(json.dumps(measured()))
