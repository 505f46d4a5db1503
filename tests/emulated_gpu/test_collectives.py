"""torch's real ProcessGroupNCCL over the emulated NCCL, several ranks in processes of their own."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from memo.emulated_gpu.launch import Device, environment

PROGRAM = Path(__file__).with_name("ranks_of_nccl.py")
TIMEOUT_S = 240
HANG_S = 5.0


class Ending(NamedTuple):
    status: int
    out: str
    err: str
    process: int


def run_ranks_of(scenario: str, size: int, tmp_path: Path, schedule: str) -> list[Ending]:
    """How each rank ended."""
    ranks = start(scenario, size, tmp_path, Device(schedule=schedule, check_races=True))
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in ranks]
    return [Ending(rank.returncode, *output, rank.pid) for rank, output in zip(ranks, outputs, strict=True)]


def start(scenario: str, size: int, tmp_path: Path, device: Device) -> list[subprocess.Popen[str]]:
    env = environment(device, tmp_path / "gpu.txt")
    command = [sys.executable, str(PROGRAM), scenario]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "store")],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize(
    ("scenario", "size"), [("collectives", 3), ("messages", 2), ("questions", 2), ("unordered", 2)]
)
def test_ranks_agree(tmp_path: Path, scenario: str, size: int, schedule: str) -> None:
    for rank in run_ranks_of(scenario, size, tmp_path, schedule):
        assert (rank.status, rank.out.split()[-1:]) == (0, ["done"]), rank.err
        assert scenario == "unordered" or "race:" not in rank.err, rank.err
        # The folder of a communicator is named after the process that made its id.
        assert not list(Path("/dev/shm").glob(f"emulated_nccl_*_{rank.process}*"))


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    results = run_ranks_of("disagreement", 2, tmp_path, "lazy")
    assert all(rank.status != 0 for rank in results)
    assert all("ranks disagree on operation 0" in rank.err for rank in results), results


def test_collectives_in_another_order_are_told_with_the_calls_of_both_sides(tmp_path: Path) -> None:
    for rank in run_ranks_of("order_of_collectives", 2, tmp_path, "lazy"):
        assert rank.status != 0
        message = rank.err[rank.err.index("NCCL: ranks disagree on operation 0") :]
        assert "ncclAllReduce of 4 elements" in message and "ncclAllGather of 4 elements" in message
        assert re.search(r"emulated_gpu/ranks_of_nccl.py:\d+ in reduce_first\n", message), message
        assert re.search(r"emulated_gpu/ranks_of_nccl.py:\d+ in gather_first\n", message), message


def test_ranks_that_wait_for_each_other_tell_what_both_are_in(tmp_path: Path) -> None:
    """Rank 0's message waits for its receiver, which waits for rank 0's collective: both hang until they are killed."""
    ranks = start("order_of_messages", 2, tmp_path, Device(schedule="lazy", hang_s=HANG_S))
    told = ["", ""]
    for index, rank in enumerate(ranks):
        assert rank.stderr is not None
        for line in rank.stderr:
            told[index] += line
            if "in order_of_messages" in line and "most recent call first" in told[index]:
                break
    for rank in ranks:
        rank.kill()
        rank.communicate()
    sides = (("ncclSend", "send_first"), ("ncclAllReduce", "receive_last"))
    for message, mine, other in ((told[0], *sides), (told[1], *reversed(sides))):
        assert f"process {ranks[told.index(message)].pid} has waited for stream" in message
        assert re.search(
            rf"is in {mine[0]} of 4 elements[^,]*, number 0[^\n]*, called at\n    \S+ in {mine[1]}", message
        )
        assert re.search(
            rf"has begun last {other[0]} of 4 [^,]*, number 0[^\n]*, called at\n    \S+ in {other[1]}", message
        )
