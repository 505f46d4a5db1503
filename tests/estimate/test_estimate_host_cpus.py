"""CPUs of a rank: affinity, quotas of control groups (made up in files), and the share of each rank."""

import os
from pathlib import Path

import pytest

from memo.estimate.host_cpus import allowed_cpus, cpu_quota, threads_of_a_rank

NODE0, ALL = range(64), range(128)


@pytest.mark.parametrize(
    ("own", "launcher", "quota", "ranks", "threads"),
    [
        (ALL, ALL, float("inf"), 1, 128),
        (ALL, ALL, float("inf"), 8, 16),  # nothing bound: the share
        (NODE0, ALL, float("inf"), 8, 16),  # bound to one of two nodes, which four ranks share
        (range(16), ALL, float("inf"), 8, 16),  # bound to CPUs of its own
        (range(4), ALL, float("inf"), 8, 4),
        (range(32), range(32), float("inf"), 8, 4),  # Slurm gave the job a quarter of the node
        (ALL, ALL, 48.0, 8, 6),  # Kubernetes' limits.cpu
        (ALL, ALL, 2.5, 1, 2),
        (ALL, ALL, 4.0, 8, 1),
        (range(2), range(2), 0.5, 1, 1),
    ],
)
def test_share_of_a_rank(own: range, launcher: range, quota: float, ranks: int, threads: int) -> None:
    assert threads_of_a_rank(own, launcher, quota, ranks) == threads


def test_allowed_cpus_are_those_of_the_process_asked_for() -> None:
    assert allowed_cpus() == os.sched_getaffinity(0)
    assert allowed_cpus(os.getppid()) == os.sched_getaffinity(os.getppid())
    assert allowed_cpus(2**22 + 1) == frozenset(range(os.cpu_count() or 1))  # no such process


class Groups:
    def __init__(self, folder: Path, own: str) -> None:
        self.root, self.own = folder / "cgroup", folder / "own"
        self.own.write_text(own)

    def add(self, path: str, **values: str) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (self.root / path / name.replace("cpu_", "cpu.")).write_text(f"{value}\n")

    def quota(self) -> float:
        return cpu_quota(self.root, self.own)


def test_version_2_takes_the_tightest_of_all_parents(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/kubepods/pod/container\n")
    groups.add("kubepods/pod/container", cpu_max="max 100000")
    groups.add("kubepods/pod", cpu_max="250000 100000")
    groups.add("kubepods", cpu_max="6400000 100000")
    assert groups.quota() == 2.5


def test_version_1(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "5:memory:/m\n4:cpu,cpuacct:/job\n0::/\n")
    groups.add("cpu/job", cpu_cfs_quota_us="300000", cpu_cfs_period_us="100000")
    groups.add("cpu", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    groups.add("memory/m", cpu_cfs_quota_us="100000", cpu_cfs_period_us="100000")  # not the controller asked for
    assert groups.quota() == 3.0


@pytest.mark.parametrize("own", ["0::/a\n", ""])
def test_no_limit(own: str, tmp_path: Path) -> None:
    groups = Groups(tmp_path, own)
    groups.add("a", cpu_max="max 100000")
    assert groups.quota() == float("inf")
    assert cpu_quota(tmp_path, tmp_path / "missing") == float("inf")
