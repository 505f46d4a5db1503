"""What `memo doctor` asks of several ranks that torchrun or srun has started: which node is missing, and which is slow.

    roll call              who has not come                                          memo.mesh.roll_call
    within each node       an all-reduce of its ranks                                a broken or slow link between GPUs
    between two nodes      an all-reduce of their first ranks, around a ring         a broken or slow network card
    all ranks              an all-reduce

One after the other, so that no two of them share a link. The first rank tells what all have found.
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
"""Of the best rate: a node or a link below it is called slow."""
_FIRST_PORT, _NUM_PORTS = 20000, 12768
"""Below those that systems give to whoever asks for any."""
_REMEDIES = {
    "within nodes": "nvidia-smi topo -m and dmesg on it: GPUs that cannot reach each other talk through host memory",
    "between nodes": "ibstat or ethtool on it: a port that came up at a lower rate; NCCL_DEBUG=INFO says which one "
    "NCCL takes",
    "all ranks": "NCCL_DEBUG=INFO on all ranks",
}


class Node(NamedTuple):
    """The ranks of a node, and its name: its number where nobody knows its host yet."""

    name: str
    ranks: range


class Reduction(NamedTuple):
    """An all-reduce of some ranks: of a node, of the first ranks of two neighbours, or of all."""

    kind: str
    nodes: tuple[Node, ...]
    ranks: tuple[int, ...]


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun for a task that srun itself has started; none for any other process."""
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
    """As srun or torchrun deals out ranks: node after node."""
    hosts, counts = _nodes_of_slurm(environment)
    if sum(counts) != size or len(counts) != len(hosts):  # under srun torchrun, a task is a node's launcher
        local = local_world_size_from_env()
        counts = [min(local, size - first) for first in range(0, size, local)]
        hosts = [f"node {number} of {len(counts)}, counted from 0" for number in range(len(counts))]
    ends = itertools.accumulate(counts)
    return [Node(host, range(end - count, end)) for host, count, end in zip(hosts, counts, ends, strict=True)]


def _nodes_of_slurm(environment: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """The hosts of a step of Slurm, and the number of tasks of each: `8(x2),4` is 8, 8, 4."""
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
    """What this node's checks have found, and what those of all ranks do; None where another rank tells it."""
    from memo.mesh.roll_call import call_roll, open_store

    rank, size, timeout = rank_from_env(), world_size_from_env(), timedelta(seconds=wait_s)
    nodes = nodes_of(os.environ, size)
    try:
        store = open_store(rank, timeout)
    except MemoError as error:  # the first rank, or its node, is the one that is missing
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
    """With the hosts of the ranks that have come."""
    return [Node(next((hosts[rank] for rank in node.ranks if rank in hosts), node.name), node.ranks) for node in nodes]


def check_missing(nodes: Sequence[Node], hosts: Mapping[int, str], error: str) -> Finding:
    """`hosts` of the ranks that have come; `error` tells why they did not agree where none is missing."""
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
    """What is wrong on other nodes, by name, and not so on this one; alike findings of several nodes are one."""
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
    """A finding for each kind of test.

    Args:
        rates: bytes a second of each link of a ring, as far as tests have ended; the next one has not.
        problem: why it has not, as the first rank met it.
    """
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
    """The findings of all tests, on the first rank; `run` is the store."""
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
            for _ in range(1 + _REPEATS if rank in test.ranks else 0):  # the first one connects
                start_s = time.perf_counter()
                dist.all_reduce(message, group=group)
                if kind == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - start_s)
            if rank == test.ranks[0]:  # bytes a second over each link of a ring, the best of a few times
                share = 2 * (len(test.ranks) - 1) / len(test.ranks)
                run.set(f"rate/{number}", str(share * message.nbytes / min(seconds[1:])))
    except RuntimeError as error:  # a message that does not come; the tests that have ended tell which one it is of
        problem = str(error).splitlines()[0]
    finally:
        shutdown()
    if rank:
        return []
    keys = [f"rate/{number}" for number in range(len(tests))]
    rates = [float(run.get(key)) for at, key in enumerate(keys) if run.check(keys[: at + 1])]
    return judged(tests, rates, message.nbytes, problem)


def _gathered(run: Any, rank: int, size: int, name: str, value: Any) -> list[Any]:
    """What every rank has to say, by rank, through the store alone."""
    run.set(f"{name}/{rank}", json.dumps(value))
    return [json.loads(run.get(f"{name}/{each}")) for each in range(size)]
