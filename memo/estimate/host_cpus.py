"""How many CPUs the ranks of a node may use: those that the system allows them, or fewer inside a container."""

import os
from collections.abc import Collection

from memo.estimate.cgroups import ControlGroup, own_control_groups


def allowed_cpus(pid: int = 0) -> frozenset[int]:
    """CPUs that a process (by default this one) may run on; all CPUs if the system does not say."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # not Linux; or a process that is gone, or another user's
        return frozenset(range(os.cpu_count() or 1))


def cpu_quota() -> float:
    """CPU time that the control groups of this process allow, in CPUs (Kubernetes' limits.cpu); infinite if unlimited.

    `allowed_cpus` does not show a quota: it stops a process that has used its time for the rest of each period.
    """
    quotas = [quota for group in own_control_groups("cpu") for quota in _quota(group)]
    return min(quotas, default=float("inf"))


def threads_of_a_rank(own: Collection[int], launcher: Collection[int], quota_cpus: float, local_ranks: int) -> int:
    """CPU threads of one of `local_ranks` ranks of a node, at least one.

    Args:
        own: CPUs that the rank may run on; fewer than the launcher's if the rank is bound to a NUMA node by memo,
            torchrun --numa-binding or Slurm.
        launcher: CPUs of the process that started all ranks of the node; the ranks share these, and `quota_cpus`.
    """
    share = int(min(len(launcher), quota_cpus) / local_ranks)
    return max(1, min(len(own), share))


def _quota(group: ControlGroup) -> list[float]:
    """[CPUs that a control group allows], or [] if it sets no limit."""
    try:
        if group.version == 2:
            quota, period = (group.folder / "cpu.max").read_text().split()
        else:
            quota = (group.folder / "cpu.cfs_quota_us").read_text().strip()
            period = (group.folder / "cpu.cfs_period_us").read_text().strip()
    except OSError:
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]
