"""Ranks meet in a store that outlives them: what earlier processes left there never counts."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from memo.artifacts.processes import process_start
from memo.errors import ConfigError, RankLost
from memo.mesh.presence import CENSUS_S, Presence
from memo.mesh.roll_call import Member, call_roll, open_store

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.5)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def together(calls: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    """What each rank returns or raises, all at one time."""
    found: dict[int, Any] = {}

    def call(rank: int) -> None:
        try:
            found[rank] = calls[rank]()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def roll(
    server: dist.TCPStore, size: int, ranks: list[int], timeout: timedelta = LONG, words: dict[int, str] | None = None
) -> dict[int, Any]:
    said = words or {}
    return together(
        {r: lambda r=r: call_roll(server.clone(), r, size, timeout, said.get(r, "")) for r in ranks}  # type: ignore[misc]
    )


def test_all_ranks_get_one_place_of_their_own_in_the_store(server: dist.TCPStore) -> None:
    lives = [roll(server, 3, [0, 1, 2]) for _ in range(2)]
    for found in lives:
        members = [members for _, members in found.values()]
        assert members[0] == members[1] == members[2] and len({member.identity for member in members[0]}) == 3
    first, second = (found[0][0] for found in lives)
    lives[0][1][0].set("key", "of the first life")
    assert first.get("key") == b"of the first life" and not second.check(["key"])


def test_a_life_that_not_all_ranks_reached_does_not_confuse_the_next(server: dist.TCPStore) -> None:
    """A count of each rank's starts would be one apart from here on, and all later lives wait for ever."""
    for found in roll(server, 3, [0, 2], SHORT).values():
        assert isinstance(found, RankLost)
        assert "ranks 1 of 3 did not come within --distributed-timeout-minutes 0.00833" in str(found)
    found = roll(server, 3, [0, 1, 2])
    assert found[0][1] == found[1][1] == found[2][1]


def test_followers_that_come_first_wait_for_the_new_roll(server: dist.TCPStore) -> None:
    roll(server, 2, [0, 1])
    assert isinstance(roll(server, 2, [1], SHORT)[1], RankLost)
    found = roll(server, 2, [0, 1])
    assert found[0][1] == found[1][1]


def test_who_refuses_is_heard_by_those_who_do_not(server: dist.TCPStore) -> None:
    found = roll(server, 3, [0, 1, 2], words={1: "--load nowhere: not there"})
    for rank in (0, 2):
        assert isinstance(found[rank], RankLost)
        assert "rank 1 (" in str(found[rank]) and "has not started: --load nowhere: not there" in str(found[rank])
    assert not isinstance(found[1], Exception)  # it has its own error to tell


def test_the_meeting_place_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "x")
    with pytest.raises(ConfigError, match="MASTER_ADDR is None and MASTER_PORT is x, which name no host and port"):
        open_store(0, SHORT)


def test_a_store_that_nobody_keeps_is_told_by_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(taken.port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    del taken
    with pytest.raises(RankLost, match=r"rank 0 does not answer at localhost:\d+ within 0\.5 s"):
        open_store(1, SHORT)


def presences(server: dist.TCPStore, size: int, pids: dict[int, int], timeout_s: float = 60.0) -> list[Presence]:
    here = Member.here()
    members = [Member(str(r), here.host, here.place, pids.get(r, here.pid)) for r in range(size)]
    names = [f"rank {r} (here)" for r in range(size)]
    timeout = timedelta(seconds=timeout_s)
    return [Presence(server.clone(), r, members, names, timeout) for r in range(size)]


def arrive(rank: Presence) -> None:
    """Returns when the store has what `rank` told it: it answers a read, but no write, of the same connection."""
    rank.numbers()


def test_the_first_loss_counts_and_all_read_it(server: dist.TCPStore) -> None:
    ranks = presences(server, 3, {})
    assert ranks[0].lost() is None
    assert ranks[2].leave("a disk").describe() == "rank 2 (here) left first: a disk"
    assert ranks[1].leave("its own trouble").rank == 2
    assert ranks[0].lost() == ranks[1].lost() != None  # noqa: E711


def test_silence_is_a_loss_after_the_timeout_and_only_as_far_as_this_process_ran(server: dist.TCPStore) -> None:
    ranks = presences(server, 2, {}, timeout_s=5.0)
    for rank in ranks:
        rank.beat()
        arrive(rank)
    assert ranks[0].look_around(0.0) is None
    assert ranks[0].look_around(3600.0) is None  # an hour in which this process was stopped itself
    ranks[1].beat()
    arrive(ranks[1])
    assert [ranks[0].look_around(1.0) for _ in range(6)] == [None] * 6
    loss = ranks[0].look_around(1.0)
    assert loss is not None and loss.rank == 1 and "nothing was heard of it for 5 s" in loss.why
    assert CENSUS_S < 5.0


def test_who_has_left_in_order_is_not_missed(server: dist.TCPStore) -> None:
    ranks = presences(server, 2, {}, timeout_s=5.0)
    ranks[1].leave_in_order()
    arrive(ranks[1])
    assert [ranks[0].look_around(2.0) for _ in range(9)] == [None] * 9
    assert ranks[0].silent_since(ranks[0].numbers()) is None


def test_who_keeps_the_store_stays_while_another_lives_and_is_not_done(server: dist.TCPStore) -> None:
    ranks = presences(server, 3, {})
    stays = threading.Thread(target=ranks[0].wait_for_readers, args=(2.0,), daemon=True)
    ranks[0].leave_in_order()
    ranks[1].leave_in_order()
    stays.start()
    for _ in range(30):  # for 3 s
        ranks[2].beat()
        stays.join(timeout=0.1)
        assert stays.is_alive()
    ranks[2].leave_in_order()
    stays.join(timeout=60.0)
    assert not stays.is_alive()


def test_who_keeps_the_store_does_not_stay_for_the_silent(server: dist.TCPStore) -> None:
    ranks = presences(server, 2, {})
    ranks[1].beat()
    ranks[0].leave_in_order()
    ranks[0].wait_for_readers(0.2)


def test_a_census_names_those_whose_numbers_stand(server: dist.TCPStore) -> None:
    ranks = presences(server, 4, {})
    before = ranks[0].numbers()
    ranks[1].beat()
    arrive(ranks[1])
    loss = ranks[0].silent_since(before)
    assert loss is not None and loss.rank == 2 and "and with it ranks 3" in loss.why


def test_processes_that_have_ended_do_not_run() -> None:
    import os
    import subprocess

    child = subprocess.Popen(["sleep", "60"])
    assert process_start(child.pid) and process_start(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has read its status
    assert not process_start(child.pid)
    child.wait()
    assert not process_start(child.pid)
