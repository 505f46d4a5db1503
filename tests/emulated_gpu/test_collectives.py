"""torch's real ProcessGroupNCCL over the emulated NCCL, several ranks in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from memo.emulated_gpu.launch import Device, environment

PROGRAM = Path(__file__).with_name("ranks_of_nccl.py")
TIMEOUT_S = 240


def run_ranks_of(scenario: str, size: int, tmp_path: Path, schedule: str) -> list[tuple[int, str, str]]:
    """(exit status, standard output, standard error) by rank."""
    env = environment(Device(schedule=schedule, check_races=True), tmp_path / "gpu.txt")
    command = [sys.executable, str(PROGRAM), scenario]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "store")],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in ranks]
    return [(process.returncode, *output) for process, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize(("scenario", "size"), [("collectives", 3), ("messages", 2), ("unordered", 2)])
def test_ranks_agree(tmp_path: Path, scenario: str, size: int, schedule: str) -> None:
    left = set(Path("/dev/shm").glob("emulated_nccl_*"))
    for status, out, err in run_ranks_of(scenario, size, tmp_path, schedule):
        assert (status, out.split()[-1:]) == (0, ["done"]), err
        assert scenario == "unordered" or "race:" not in err, err
    assert set(Path("/dev/shm").glob("emulated_nccl_*")) <= left


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    results = run_ranks_of("disagreement", 2, tmp_path, "lazy")
    assert all(status != 0 for status, _, _ in results)
    assert all("ranks disagree on operation 0" in err for _, _, err in results), results
