"""One process builds at a time, and the others say what they wait for."""

import errno
import fcntl
import io
import sys
import threading
import time
from pathlib import Path

import pytest

from memo.artifacts import build_lock as module
from memo.artifacts.build_lock import build_lock


def wait_for(what: str, told: io.StringIO) -> None:
    while what not in told.getvalue():
        time.sleep(0.01)


def test_one_at_a_time_and_a_long_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, order = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", told)
    monkeypatch.setattr(module, "TELL_AFTER_S", 0.0)

    def second() -> None:
        with build_lock(tmp_path / "lock", "the library"):
            order.append("second")

    with build_lock(tmp_path / "lock", "the library"):
        thread = threading.Thread(target=second)
        thread.start()
        wait_for("\n", told)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert told.getvalue() == f"waiting for another process that builds the library, which holds {tmp_path / 'lock'}\n"


def test_a_short_wait_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def second() -> None:
        with build_lock(tmp_path / "lock", "the library"):
            seen.append("second")

    with build_lock(tmp_path / "lock", "the library"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not seen
    thread.join()
    assert seen and not capsys.readouterr().err


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks"), build_lock(tmp_path / "lock", "the library"):
        pass
    with build_lock(tmp_path / "lock", "the library", works_without=True) as nothing:
        assert nothing is None
