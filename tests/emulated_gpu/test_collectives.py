"""torch's real ProcessGroupNCCL over the emulated NCCL, several ranks in processes of their own."""

import re
import time
from pathlib import Path

import own_process
import pytest
from forked import Process

from memo.emulated_gpu.launch import Device

PROGRAM = Path(__file__).with_name("ranks_of_nccl.py")
TIMEOUT_S = 240
HANG_S = 5.0


def start(scenario: str, size: int, tmp_path: Path, device: Device) -> list[Process]:
    arguments = [[scenario, str(rank), str(size), str(tmp_path / "store")] for rank in range(size)]
    return [own_process.start(tmp_path, PROGRAM, device, its) for its in arguments]


def run_ranks_of(scenario: str, size: int, tmp_path: Path, schedule: str) -> list[Process]:
    """They have ended."""
    ranks = start(scenario, size, tmp_path, Device(schedule=schedule, check_races=True))
    for rank in ranks:
        rank.wait()
    return ranks


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize(
    ("scenario", "size"), [("collectives", 3), ("messages", 2), ("questions", 2), ("unordered", 2)]
)
def test_ranks_agree(tmp_path: Path, scenario: str, size: int, schedule: str) -> None:
    for rank in run_ranks_of(scenario, size, tmp_path, schedule):
        assert (rank.wait(), rank.out.split()[-1:]) == (0, ["done"]), rank.err
        assert scenario == "unordered" or "race:" not in rank.err, rank.err
        # The folder of a communicator is named after the process that made its id.
        assert not list(Path("/dev/shm").glob(f"emulated_nccl_*_{rank.pid}"))


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    results = run_ranks_of("disagreement", 2, tmp_path, "lazy")
    assert all(rank.wait() != 0 for rank in results)
    assert all("ranks disagree on operation 0" in rank.err for rank in results), [rank.err for rank in results]


def test_collectives_in_another_order_are_told_with_the_calls_of_both_sides(tmp_path: Path) -> None:
    for rank in run_ranks_of("order_of_collectives", 2, tmp_path, "lazy"):
        assert rank.wait() != 0
        message = rank.err[rank.err.index("NCCL: ranks disagree on operation 0") :]
        assert "ncclAllReduce of 4 elements" in message and "ncclAllGather of 4 elements" in message
        assert re.search(r"emulated_gpu/ranks_of_nccl.py:\d+ in reduce_first\n", message), message
        assert re.search(r"emulated_gpu/ranks_of_nccl.py:\d+ in gather_first\n", message), message


def test_ranks_that_wait_for_each_other_tell_what_both_are_in(tmp_path: Path) -> None:
    """Rank 0's message waits for its receiver, which waits for rank 0's collective: both hang until they are killed."""
    ranks = start("order_of_messages", 2, tmp_path, Device(schedule="lazy", hang_s=HANG_S))
    deadline = time.monotonic() + TIMEOUT_S
    for rank in ranks:
        while not re.search(r"most recent call first(?s:.)* in order_of_messages\n", rank.err):
            assert time.monotonic() < deadline, f"nothing was told:\n{rank.err}"
            time.sleep(0.1)
    for rank in ranks:
        rank.kill()
    sides = (("ncclSend", "send_first"), ("ncclAllReduce", "receive_last"))
    for rank, mine, other in ((ranks[0], *sides), (ranks[1], *reversed(sides))):
        message = rank.err
        assert f"process {rank.pid} has waited for stream" in message
        assert re.search(
            rf"is in {mine[0]} of 4 elements[^,]*, number 0[^\n]*, called at\n    \S+ in {mine[1]}", message
        )
        assert re.search(
            rf"has begun last {other[0]} of 4 [^,]*, number 0[^\n]*, called at\n    \S+ in {other[1]}", message
        )
