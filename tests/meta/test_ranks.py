"""The process harness itself.

Results in rank order, a failing, a dying and a hung rank, tensors both ways.
"""

import os
import subprocess
import sys
import time

import forked
import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks

HANG_S = 500.0


def _sum_of_ranks(offset: torch.Tensor, scale: int = 1) -> tuple[int, torch.Tensor]:
    x = offset * scale + dist.get_rank()
    dist.all_reduce(x)
    return dist.get_rank(), x


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("boom 42")
    dist.barrier()


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    time.sleep(HANG_S)


def _sleep_in_a_recognisable_place() -> None:
    if dist.get_rank() == 1:
        time.sleep(HANG_S)


def _thread_count() -> int:
    return torch.get_num_threads()


def test_results_come_back_by_rank() -> None:
    results = run_ranks(3, _sum_of_ranks, torch.ones(2), scale=2)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, x in results:
        assert torch.equal(x, torch.full((2,), 9.0))


def test_ranks_use_one_thread() -> None:
    assert run_ranks(2, _thread_count) == [1, 1]


def test_first_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3 raised:.*_fail_on.*ValueError: boom 42"):
        run_ranks(3, _fail_on, 1)


def test_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        run_ranks(2, _exit_on, 1)


def test_hung_rank_shows_its_stack() -> None:
    started_s = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)did not finish within 2 s.*_sleep_in_a_recognisable_place"):
        run_ranks(2, _sleep_in_a_recognisable_place, timeout_s=2)
    assert time.monotonic() - started_s < HANG_S / 2


def test_the_server_ends_with_who_started_it() -> None:
    program = "import forked, time; forked.server(); print(flush=True); time.sleep(500)"
    environment = {name: value for name, value in os.environ.items() if name != forked.ADDRESS}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        starter.stdout.readline()
        servers = psutil.Process(starter.pid).children()
        starter.kill()
    assert len(servers) == 1
    assert psutil.wait_procs(servers, timeout=60)[1] == []
