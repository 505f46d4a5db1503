"""CPUs of a rank: affinity, quotas of control groups (made up in files), and the share of each rank."""

import os
from pathlib import Path

import pytest
from control_groups import control_groups

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


@pytest.mark.parametrize(
    ("own", "groups", "quota"),
    [
        (
            "0::/kubepods/pod/container\n",
            {
                "kubepods/pod/container": {"cpu.max": "max 100000"},
                "kubepods/pod": {"cpu.max": "250000 100000"},
                "kubepods": {"cpu.max": "6400000 100000"},
            },
            2.5,
        ),
        (
            "5:memory:/m\n4:cpu,cpuacct:/job\n0::/\n",
            {
                "cpu/job": {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000},
                "cpu": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000},
                "memory/m": {"cpu.cfs_quota_us": 100000, "cpu.cfs_period_us": 100000},
            },
            3.0,
        ),
        ("0::/a\n", {"a": {"cpu.max": "max 100000"}}, float("inf")),
        ("", {"a": {"cpu.max": "max 100000"}}, float("inf")),
    ],
    ids=["tightest parent", "version 1, of the controller asked for", "no limit", "no group"],
)
def test_quota_of_a_group(
    own: str, groups: dict[str, dict[str, object]], quota: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_groups(tmp_path, own, groups, monkeypatch)
    assert cpu_quota() == quota
    control_groups(tmp_path, None, {}, monkeypatch)
    assert cpu_quota() == float("inf")
