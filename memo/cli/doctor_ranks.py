"""What `memo doctor` asks of several ranks that torchrun or srun has started: which node is missing, and which is slow.

    roll call              who has not come                                          memo.mesh.roll_call
    within each node       an all-reduce of its ranks                                a broken or slow link between GPUs
    between two nodes      an all-reduce of their first ranks, around a ring          a broken or slow network card
    all ranks              an all-reduce

One after the other, so that no two of them share a link. The first rank tells what all have found.
"""

import dataclasses
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from memo.cli.doctor_checks import Finding
from memo.config.derived import local_world_size_from_env, rank_from_env, world_size_from_env
from memo.errors import MemoError, RankLost, is_first_of_node
from memo.units import MIB, format_bytes

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from memo.mesh.roll_call import Member

_MESSAGE_BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}
_REPEATS = 3
_ALL_OUTPUTS = "look at the output of all ranks"
SLOW_SHARE = 0.5
"""Of the best rate: a node or a link below it is called slow."""
_FIRST_PORT, _NUM_PORTS = 20000, 12768
"""Below those that systems give to whoever asks for any."""
Kind = Literal["within nodes", "between nodes", "all ranks"]
_REMEDIES: dict[Kind, str] = {
    "within nodes": "nvidia-smi topo -m and dmesg on it: GPUs that cannot reach each other talk through host memory",
    "between nodes": "ibstat or ethtool on it: a port that came up at a lower rate; NCCL_DEBUG=INFO says which one "
    "NCCL takes",
    "all ranks": "NCCL_DEBUG=INFO on all ranks",
}


@dataclass(frozen=True)
class Nodes:
    """The node of each rank, as the launcher deals ranks out, and names of nodes; empty where nobody knows one yet."""

    of_rank: tuple[int, ...]
    names: tuple[str, ...]

    def ranks(self, node: int) -> tuple[int, ...]:
        return tuple(rank for rank, at in enumerate(self.of_rank) if at == node)

    def called(self, node: int) -> str:
        return self.names[node] or f"node {node} of {len(self.names)}, counted from 0"

    def named_by(self, hosts: Mapping[int, str]) -> "Nodes":
        """With the hosts of the ranks that have come."""
        known = {self.of_rank[rank]: host for rank, host in hosts.items()}
        return Nodes(self.of_rank, tuple(known.get(node, name) for node, name in enumerate(self.names)))


@dataclass(frozen=True)
class Reduction:
    """An all-reduce of some ranks: of a node, of the first ranks of two neighbours, or of all."""

    kind: Kind
    nodes: tuple[int, ...]
    ranks: tuple[int, ...]


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun for a task that srun itself has started; none for any other process."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    if "WORLD_SIZE" in environment or not tasks.isdecimal() or not hosts:
        return {}
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    counts = _expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environment.get("SLURM_NODEID", "0"))
    return {
        "RANK": environment.get("SLURM_PROCID", "0"),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(counts[node] if node < len(counts) else 1),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(_FIRST_PORT + (16 * job + step) % _NUM_PORTS),
    }


def nodes_of(environment: Mapping[str, str], size: int) -> Nodes:
    """As srun or torchrun deals out ranks: node after node."""
    counts = _expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    if sum(counts) == size and len(counts) == len(hosts):  # under srun torchrun, a task is a node's launcher
        return Nodes(tuple(node for node, count in enumerate(counts) for _ in range(count)), tuple(hosts))
    local = local_world_size_from_env()
    return Nodes(tuple(rank // local for rank in range(size)), ("",) * math.ceil(size / local))


def expand_hosts(text: str) -> list[str]:
    """`gpu[08-10,12],login1` -> gpu08, gpu09, gpu10, gpu12, login1."""
    hosts = []
    for name, inside, rest in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", text):
        for span in inside.split(",") if inside else [""]:
            first, _, last = span.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first.isdecimal() else []
            hosts += [f"{name}{number:0{len(first)}d}{rest}" for number in numbers] or [f"{name}{rest}"]
    return hosts


def _expand_counts(text: str) -> list[int]:
    """`8(x2),4` -> 8, 8, 4."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def with_ranks(found: list[Finding], wait_s: float) -> list[Finding] | None:
    """What this node's checks have found, and what those of all ranks do; None where another rank tells it."""
    from memo.mesh.roll_call import call_roll, open_store

    rank, size, timeout = rank_from_env(), world_size_from_env(), timedelta(seconds=wait_s)
    nodes = nodes_of(os.environ, size)
    try:
        store = open_store(rank, timeout)
    except MemoError as error:  # the first rank, or its node, is the one that is missing
        problem = Finding("ranks", "STOPS", str(error), f"look at {nodes.called(0)}, where the first rank runs")
        return [*found, problem] if is_first_of_node() else None
    try:
        run, members = call_roll(store, rank, size, timeout)
    except RankLost as error:
        return None if rank else [*found, check_missing(nodes, _arrived(store, size), str(error))]
    nodes = nodes.named_by({each: member.host for each, member in enumerate(members)})
    try:
        everyone = _gathered(run, rank, members, "found", [dataclasses.asdict(each) for each in found])
        measured = _measured(run, rank, nodes, members, timeout)
    except RuntimeError as error:  # of the store, which a rank has left too early
        return None if rank else [*found, Finding("ranks", "STOPS", f"one has gone ({error})", _ALL_OUTPUTS)]
    if rank:
        return None
    here = Finding("ranks", "ok", f"{size} on {len(nodes.names)} node{'s' * (len(nodes.names) > 1)}")
    others = {nodes.called(at): everyone[nodes.ranks(at)[0]] for at in range(1, len(nodes.names))}
    return [*found, here, *elsewhere(others, found), *measured]


def check_missing(nodes: Nodes, hosts: Mapping[int, str], error: str) -> Finding:
    """`hosts` of the ranks that have come; `error` tells why they did not agree where none is missing."""
    nodes = nodes.named_by(hosts)
    absent = [rank for rank in range(len(nodes.of_rank)) if rank not in hosts]
    if not absent:
        return Finding("ranks", "STOPS", error, _ALL_OUTPUTS)
    parts = []
    for node in dict.fromkeys(nodes.of_rank[rank] for rank in absent):
        own = [rank for rank in nodes.ranks(node) if rank in absent]
        parts.append(f"{nodes.called(node)} (rank {_listed(own)} of its {len(nodes.ranks(node))})")
    found = f"{len(absent)} of {len(nodes.of_rank)} are missing: {'; '.join(parts)}"
    return Finding("ranks", "STOPS", found, "look at that node and at its output; --wait-s gives ranks more time")


def elsewhere(others: Mapping[str, Sequence[Mapping[str, Any]]], here: Sequence[Finding]) -> list[Finding]:
    """What is wrong on other nodes, by name, and not so on this one; alike findings of several nodes are one."""
    nodes: dict[Finding, list[str]] = {}
    for name, found in others.items():
        for each in (Finding(**fields) for fields in found):
            if each.state != "ok" and each not in here:
                nodes.setdefault(each, []).append(name)
    return [dataclasses.replace(each, name=f"{each.name} on {', '.join(names)}") for each, names in nodes.items()]


def reductions_of(nodes: Nodes) -> list[Reduction]:
    """All all-reduces in the order in which they run."""
    ranks = [nodes.ranks(node) for node in range(len(nodes.names))]
    within = [Reduction("within nodes", (node,), own) for node, own in enumerate(ranks) if len(own) > 1]
    pairs = [(node, (node + 1) % len(ranks)) for node in range(len(ranks) if len(ranks) > 2 else len(ranks) - 1)]
    between = [Reduction("between nodes", (one, other), (ranks[one][0], ranks[other][0])) for one, other in pairs]
    return [*within, *between, Reduction("all ranks", tuple(range(len(ranks))), tuple(range(len(nodes.of_rank))))]


def judged(
    tests: Sequence[Reduction], rates: Sequence[float], nodes: Nodes, num_bytes: int, problem: str = ""
) -> list[Finding]:
    """A finding for each kind of test.

    Args:
        rates: bytes a second of each link of a ring, as far as tests have ended; the next one has not.
        problem: why it has not, as the first rank met it.
    """
    findings = []
    for kind in _REMEDIES:
        own = [(test, rate) for test, rate in zip(tests, rates, strict=False) if test.kind == kind]
        if own:
            findings.append(_of_kind(kind, own, nodes, num_bytes))
    if len(rates) < len(tests):
        broken = tests[len(rates)]
        who = broken.kind if broken.kind == "all ranks" else " and ".join(map(nodes.called, broken.nodes))
        found = f"the all-reduce of {who} does not end" + (f": {problem}" if problem else "")
        findings.append(Finding(broken.kind, "STOPS", found, _REMEDIES[broken.kind]))
    return findings


def _of_kind(kind: Kind, own: Sequence[tuple[Reduction, float]], nodes: Nodes, num_bytes: int) -> Finding:
    rates = [rate for _, rate in own]
    span = f"{min(rates) / 1e9:.3g}" + (f" to {max(rates) / 1e9:.3g}" if len(rates) > 1 else "")
    found = f"all-reduce of {format_bytes(num_bytes)}: {span} GB/s"
    ends = Counter(node for test, rate in own if rate < SLOW_SHARE * max(rates) for node in test.nodes)
    if not ends:
        return Finding(kind, "ok", found)
    # A node with a slow card is at both ends of its links.
    guilty = [node for node, count in ends.items() if count > 1] or ends
    return Finding(kind, "note", f"{found}; slow: {', '.join(map(nodes.called, sorted(guilty)))}", _REMEDIES[kind])


def _measured(run: "Store", rank: int, nodes: Nodes, members: "Sequence[Member]", timeout: timedelta) -> list[Finding]:
    """The findings of all tests, on the first rank."""
    import torch
    import torch.distributed as dist

    from memo.mesh import local_device
    from memo.train.ending import shutdown

    can = torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ.get("LOCAL_RANK", "0"))
    kind = "cuda" if all(_gathered(run, rank, members, "cuda", can)) else "cpu"
    device, tests, num_bytes = local_device(kind), reductions_of(nodes), _MESSAGE_BYTES[kind]
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else NCCL's watchdog ends the process that waits
    backend, own_device, problem = ("nccl", device, "") if kind == "cuda" else ("gloo", None, "")
    try:
        dist.init_process_group(
            backend, store=run, rank=rank, world_size=len(members), timeout=timeout, device_id=own_device
        )
        for number, test in enumerate(tests):
            group = dist.new_group(list(test.ranks), timeout=timeout)
            if rank in test.ranks:
                rate = _rate(group, len(test.ranks), device, num_bytes)
                if rank == test.ranks[0]:
                    run.set(f"rate/{number}", str(rate))
    except RuntimeError as error:  # a message that does not come; the tests that have ended tell which one it is of
        problem = str(error).splitlines()[0]
    finally:
        shutdown()
    if rank:
        return []
    keys = [f"rate/{number}" for number in range(len(tests))]
    rates = [float(run.get(key)) for at, key in enumerate(keys) if run.check(keys[: at + 1])]
    return judged(tests, rates, nodes, num_bytes, problem)


def _rate(group: Any, num_ranks: int, device: "torch.device", num_bytes: int) -> float:
    """Bytes a second over each link of a ring, the best of a few times."""
    import torch
    import torch.distributed as dist

    x = torch.zeros(num_bytes // 4, device=device)
    best_s = math.inf
    for repeat in range(_REPEATS + 1):
        start_s = time.perf_counter()
        dist.all_reduce(x, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat:  # the first one connects
            best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / best_s


def _gathered(run: "Store", rank: int, members: "Sequence[Member]", name: str, value: Any) -> list[Any]:
    """What every rank has to say, by rank, through the store alone."""
    run.set(f"{name}/{rank}", json.dumps(value))
    return [json.loads(run.get(f"{name}/{each}")) for each in range(len(members))]


def _arrived(store: "Store", size: int) -> dict[int, str]:
    """Hosts of the ranks that have come, by rank."""
    keys = {rank: f"hello/{rank}" for rank in range(size)}
    return {rank: json.loads(store.get(key))["host"] for rank, key in keys.items() if store.check([key])}


def _listed(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))
