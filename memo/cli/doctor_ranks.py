"""Checks of `memo doctor` under torchrun or srun: which nodes are missing, and which are slow.

    roll call              finds missing ranks (memo.mesh.roll_call)
    within each node       an all-reduce of its ranks finds a broken or slow link between GPUs
    between two nodes      an all-reduce of their first ranks, around a ring, finds a broken or slow network card
    all ranks              an all-reduce

Tests run one after another, so that no two share a link. Rank 0 prints the findings of all.
"""

import dataclasses
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from memo.cli.doctor_checks import Finding
from memo.config.derived import local_world_size_from_env, rank_from_env, world_size_from_env
from memo.errors import MemoError, is_first_of_node
from memo.units import MIB, format_bytes

_MESSAGE_BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}
_REPEATS = 3
SLOW_SHARE = 0.5
"""A node or link below this share of the best rate is called slow."""
_FIRST_PORT, _NUM_PORTS = 20000, 12768
"""A range of ports below the ephemeral ports of operating systems."""
_REMEDIES = {
    "within nodes": "nvidia-smi topo -m and dmesg on it: GPUs that cannot reach each other talk through host memory",
    "between nodes": "ibstat or ethtool on it: a port that came up at a lower rate; NCCL_DEBUG=INFO says which one "
    "NCCL takes",
    "all ranks": "NCCL_DEBUG=INFO on all ranks",
}


class Node(NamedTuple):
    """The ranks of a node, and its name: the host, or a number while the host is not known."""

    name: str
    ranks: range


class Reduction(NamedTuple):
    """An all-reduce of some ranks: all of a node, the first ranks of two neighbouring nodes, or all ranks."""

    kind: str
    nodes: tuple[Node, ...]
    ranks: tuple[int, ...]


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's environment variables for a task that srun has started; empty for any other process."""
    tasks, (hosts, counts) = environment.get("SLURM_STEP_NUM_TASKS", ""), _nodes_of_slurm(environment)
    if "WORLD_SIZE" in environment or not tasks.isdecimal() or not hosts:
        return {}
    job, step, node = (int(environment.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "STEP_ID", "NODEID"))
    return {
        "RANK": environment.get("SLURM_PROCID", "0"),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(counts[node] if node < len(counts) else 1),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(_FIRST_PORT + (16 * job + step) % _NUM_PORTS),
    }


def nodes_of(environment: Mapping[str, str], size: int) -> list[Node]:
    """The nodes of a run of `size` ranks: srun and torchrun give ranks to one node after another."""
    hosts, counts = _nodes_of_slurm(environment)
    if sum(counts) != size or len(counts) != len(hosts):  # if srun starts torchrun, a task is a launcher, not a rank
        local = local_world_size_from_env()
        counts = [min(local, size - first) for first in range(0, size, local)]
        hosts = [f"node {number} of {len(counts)}, counted from 0" for number in range(len(counts))]
    ends = itertools.accumulate(counts)
    return [Node(host, range(end - count, end)) for host, count, end in zip(hosts, counts, ends, strict=True)]


def _nodes_of_slurm(environment: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """The hosts of a Slurm step, and the number of tasks on each: `8(x2),4` is 8, 8, 4."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))]
    return expand_hosts(environment.get("SLURM_STEP_NODELIST", "")), counts


def expand_hosts(text: str) -> list[str]:
    """`gpu[08-10,12],login1` -> gpu08, gpu09, gpu10, gpu12, login1."""
    hosts = []
    for name, inside, rest in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", inside):
            hosts += [f"{name}{number:0{len(first)}d}{rest}" for number in range(int(first), int(last or first) + 1)]
        hosts += [] if inside else [f"{name}{rest}"]
    return hosts


def with_ranks(found: list[Finding], wait_s: float) -> list[Finding] | None:
    """The findings of this node's checks, and of the checks of all ranks; None if another rank prints them."""
    from memo.mesh.roll_call import call_roll, open_store

    rank, size, timeout = rank_from_env(), world_size_from_env(), timedelta(seconds=wait_s)
    nodes = nodes_of(os.environ, size)
    try:
        store = open_store(rank, timeout)
    except MemoError as error:  # rank 0 or its node is missing
        problem = Finding("ranks", "STOPS", str(error), f"look at {nodes[0].name}, where the first rank runs")
        return [*found, problem] if is_first_of_node() else None
    try:
        run, members = call_roll(store, rank, size, timeout)
        nodes = _named(nodes, {each: member.host for each, member in enumerate(members)})
        everyone = _gathered(run, rank, size, "found", [dataclasses.asdict(each) for each in found])
        measured = _measured(run, rank, size, reductions_of(nodes), timeout)
    except RuntimeError as error:  # a rank is lost, or has left the store too early
        hellos = {each: f"hello/{each}" for each in range(size)}
        if rank:
            return None
        hosts = {each: json.loads(store.get(key))["host"] for each, key in hellos.items() if store.check([key])}
        return [*found, check_missing(nodes, hosts, str(error))]
    if rank:
        return None
    here = Finding("ranks", "ok", f"{size} on {len(nodes)} node{'s' * (len(nodes) > 1)}")
    return [*found, here, *elsewhere({node.name: everyone[node.ranks[0]] for node in nodes[1:]}, found), *measured]


def _named(nodes: Sequence[Node], hosts: Mapping[int, str]) -> list[Node]:
    """Name nodes by the hosts of their ranks, as far as ranks have come."""
    return [Node(next((hosts[rank] for rank in node.ranks if rank in hosts), node.name), node.ranks) for node in nodes]


def check_missing(nodes: Sequence[Node], hosts: Mapping[int, str], error: str) -> Finding:
    """The finding about missing ranks; `hosts`: {rank that has come: host}; `error`: the problem if none is missing."""
    parts = []
    for node in _named(nodes, hosts):
        if absent := [rank for rank in node.ranks if rank not in hosts]:
            ranks = f"{absent[0]} to {absent[-1]}" if len(absent) > 8 else ", ".join(map(str, absent))
            parts.append(f"{node.name} (rank {ranks} of its {len(node.ranks)})")
    if not parts:
        return Finding("ranks", "STOPS", error, "look at the output of all ranks")
    size = nodes[-1].ranks.stop
    found = f"{size - len(hosts)} of {size} are missing: {'; '.join(parts)}"
    return Finding("ranks", "STOPS", found, "look at that node and at its output; --wait-s gives ranks more time")


def elsewhere(others: Mapping[str, Sequence[Mapping[str, Any]]], here: Sequence[Finding]) -> list[Finding]:
    """Problems of other nodes that this node does not have; equal findings of several nodes become one."""
    nodes: dict[Finding, list[str]] = {}
    for name, found in others.items():
        for each in (Finding(**fields) for fields in found):
            if each.state != "ok" and each not in here:
                nodes.setdefault(each, []).append(name)
    return [dataclasses.replace(each, name=f"{each.name} on {', '.join(names)}") for each, names in nodes.items()]


def reductions_of(nodes: Sequence[Node]) -> list[Reduction]:
    """All all-reduces in the order in which they run."""
    within = [Reduction("within nodes", (node,), tuple(node.ranks)) for node in nodes if len(node.ranks) > 1]
    pairs = [*itertools.pairwise(nodes), *([(nodes[-1], nodes[0])] if len(nodes) > 2 else [])]
    between = [Reduction("between nodes", pair, (pair[0].ranks[0], pair[1].ranks[0])) for pair in pairs]
    return [*within, *between, Reduction("all ranks", tuple(nodes), tuple(range(nodes[-1].ranks.stop)))]


def judged(tests: Sequence[Reduction], rates: Sequence[float], num_bytes: int, problem: str = "") -> list[Finding]:
    """Return a finding for each kind of test. `rates`: bytes per second of each link of a ring, for the tests that have
    ended; `problem`: rank 0's error in the first one that has not."""
    findings = []
    for kind, remedy in _REMEDIES.items():
        own = [(test, rate) for test, rate in zip(tests, rates, strict=False) if test.kind == kind]
        if not own:
            continue
        least, most = min(rate for _, rate in own), max(rate for _, rate in own)
        span = f"{least / 1e9:.3g}" + (f" to {most / 1e9:.3g}" if len(own) > 1 else "")
        found = f"all-reduce of {format_bytes(num_bytes)}: {span} GB/s"
        ends = Counter(node for test, rate in own if rate < SLOW_SHARE * most for node in test.nodes)
        # A node with a slow card is at both ends of its links.
        guilty = sorted([node for node, count in ends.items() if count > 1] or ends, key=lambda node: node.ranks[0])
        slow = ", ".join(node.name for node in guilty)
        findings.append(Finding(kind, "note", f"{found}; slow: {slow}", remedy) if slow else Finding(kind, "ok", found))
    if len(rates) < len(tests):
        broken = tests[len(rates)]
        who = broken.kind if broken.kind == "all ranks" else " and ".join(node.name for node in broken.nodes)
        found = f"the all-reduce of {who} does not end" + (f": {problem}" if problem else "")
        findings.append(Finding(broken.kind, "STOPS", found, _REMEDIES[broken.kind]))
    return findings


def _measured(run: Any, rank: int, size: int, tests: Sequence[Reduction], timeout: timedelta) -> list[Finding]:
    """Run all tests; returns the findings on rank 0. `run` is the store."""
    import torch
    import torch.distributed as dist

    from memo.mesh import local_device
    from memo.train.ending import shutdown

    can = torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ.get("LOCAL_RANK", "0"))
    kind, problem = "cuda" if all(_gathered(run, rank, size, "cuda", can)) else "cpu", ""
    device, message = local_device(kind), torch.zeros(_MESSAGE_BYTES[kind] // 4, device=local_device(kind))
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else NCCL's watchdog ends the process that waits
    how = {"backend": "nccl", "device_id": device} if kind == "cuda" else {"backend": "gloo"}
    try:
        dist.init_process_group(store=run, rank=rank, world_size=size, timeout=timeout, **how)
        for number, test in enumerate(tests):
            group, seconds = dist.new_group(list(test.ranks), timeout=timeout), []
            for _ in range(1 + _REPEATS if rank in test.ranks else 0):  # the first all-reduce connects
                start_s = time.perf_counter()
                dist.all_reduce(message, group=group)
                if kind == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - start_s)
            if rank == test.ranks[0]:  # bytes per second over each link of a ring, the best of a few repeats
                share = 2 * (len(test.ranks) - 1) / len(test.ranks)
                run.set(f"rate/{number}", str(share * message.nbytes / min(seconds[1:])))
    except RuntimeError as error:  # a message did not come; the number of ended tests tells in which test
        problem = str(error).splitlines()[0]
    finally:
        shutdown()
    if rank:
        return []
    keys = [f"rate/{number}" for number in range(len(tests))]
    rates = [float(run.get(key)) for at, key in enumerate(keys) if run.check(keys[: at + 1])]
    return judged(tests, rates, message.nbytes, problem)


def _gathered(run: Any, rank: int, size: int, name: str, value: Any) -> list[Any]:
    """Gather a value of every rank, by rank, through the store."""
    run.set(f"{name}/{rank}", json.dumps(value))
    return [json.loads(run.get(f"{name}/{each}")) for each in range(size)]
