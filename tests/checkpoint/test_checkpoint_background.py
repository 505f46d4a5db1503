"""One write at a time beside training: who waits for what, and where errors come out."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from memo.checkpoint.background import BackgroundWriter
from memo.errors import CheckpointError

CPU = torch.device("cpu")


def test_changes_wait_for_the_reading_alone_and_finish_for_all_of_it() -> None:
    writer, events = BackgroundWriter(CPU), []
    may_read, may_publish = threading.Event(), threading.Event()

    def write(on_read: Callable[[], None]) -> None:
        assert may_read.wait(10)
        time.sleep(0.1)
        events.append("read")
        on_read()
        assert may_publish.wait(10)
        events.append(writer.times_s())

    writer.start(write)
    may_read.set()
    writer.wait_until_read()
    assert events == ["read"]
    writer.wait_until_read()  # a second update does not wait again
    may_publish.set()
    writer.finish()
    taken_s, waited_s = events[1]
    assert 0.05 < waited_s <= taken_s  # of the 0.1 s, what was left when the wait began


def test_nothing_waits_when_nothing_is_written() -> None:
    writer = BackgroundWriter(CPU)
    writer.wait_until_read()
    writer.finish()
    assert not writer.failed


def test_the_next_write_waits_for_the_one_before() -> None:
    writer, order = BackgroundWriter(CPU), []

    def first(on_read: Callable[[], None]) -> None:
        on_read()
        time.sleep(0.1)
        order.append("first")

    writer.start(first)
    writer.start(lambda on_read: order.append("second"))
    writer.finish()
    assert order == ["first", "second"]


@pytest.mark.parametrize("where", ["start", "finish"])
def test_an_error_comes_out_once_and_nobody_waits_for_a_dead_write(where: str) -> None:
    writer = BackgroundWriter(CPU)

    def fail(_: Callable[[], None]) -> None:
        raise CheckpointError("disk full")

    writer.start(fail)
    writer.wait_until_read()
    with pytest.raises(CheckpointError, match="disk full"):
        writer.start(lambda _: None) if where == "start" else writer.finish()
    assert not writer.failed
    writer.start(lambda on_read: on_read())  # and it goes on
    writer.finish()


def test_failed_is_known_without_waiting() -> None:
    writer, go = BackgroundWriter(CPU), threading.Event()

    def fail(_: Callable[[], None]) -> None:
        assert go.wait(300)
        raise CheckpointError("disk full")

    writer.start(fail)
    assert not writer.failed
    go.set()
    deadline_s = time.monotonic() + 300
    while not writer.failed and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert writer.failed
    with pytest.raises(CheckpointError):
        writer.finish()
