"""Run a function on several ranks: a process per rank and call, forked from a server that has torch (forked.py)."""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from forked import Process, fork

STACK_DUMP_S = 30.0
"""Longest wait for the stacks of a hung rank."""
STACKS = "(most recent call first)"
"""Stands in the errors of a rank that was asked for its stacks."""
TIMEOUT_S = 600.0
"""Tells of ranks that hang. Slow ones on a busy machine need a tenth of it."""


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds its traceback or stacks."""


class _Rank(NamedTuple):
    process: Process
    connection: Connection


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of a gloo group and return the results by rank.

    ``fn`` must be a module-level function. Each rank imports its module, so that a package that takes seconds to import
    belongs into the functions that need it. ``fn`` finds its rank through torch.distributed, and in the environment
    what torchrun would say to a rank on one machine. The first rank that raises ends the call: RankError carries its
    traceback and the other ranks are killed. After ``timeout_s`` seconds RankError carries the stacks of every rank
    that has not finished.
    """
    # Plain pickle, because multiprocessing's own would share tensors through memory that dies with its process.
    task = pickle.dumps((sys.path, pickle.dumps((fn, args, kwargs))))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task").write_bytes(task)
        ranks = [_start(rank, world_size, Path(folder)) for rank in range(world_size)]
        try:
            results = _collect(ranks, timeout_s)
            for rank in ranks:
                rank.process.poll(60)
            return results
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.connection.close()


def _start(rank: int, world_size: int, folder: Path) -> _Rank:
    same = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    environment = {**os.environ, **same, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    ours, theirs = Pipe()
    with theirs:
        outputs = folder / f"output{rank}", folder / f"errors{rank}"
        process = fork("program", "import ranks; ranks.main()", [str(folder)], environment, *outputs, theirs.fileno())
    return _Rank(process, ours)


def main() -> None:
    """Be a rank: its arguments are the folder of its call and the descriptor of its connection."""
    import torch
    import torch.distributed as dist

    folder, descriptor = sys.argv[1:]
    connection = Connection(int(descriptor))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(hours=1),  # run_ranks keeps the time: it can show every rank's stack
        )
        sys.path[:], task = pickle.loads((Path(folder) / "task").read_bytes())
        fn, args, kwargs = pickle.loads(task)
        answer = pickle.dumps((True, fn(*args, **kwargs)))
        if dist.is_initialized():  # what makes groups of its own, on other devices, ended this one first
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        # Stay until killed: closed sockets would make the other ranks fail too and hide who was first.
        connection.poll(None)
    else:
        connection.send_bytes(answer)
    os._exit(0)  # what an interpreter does at its end would take longer than most tests


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        pending = {rank.connection: i for i, rank in enumerate(ranks) if i not in results}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(_describe_hang(ranks, sorted(pending.values()), timeout_s))
        for connection in ready:
            assert isinstance(connection, Connection)
            i = pending[connection]
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                status = ranks[i].process.wait()
                raise RankError(f"rank {i} died with exit code {status}\n{_said(ranks[i])}") from None
            if not succeeded:
                raise RankError(f"rank {i} of {len(ranks)} raised:\n{value}{_said(ranks[i])}")
            results[i] = value
    return [results[i] for i in range(len(ranks))]


def _describe_hang(ranks: list[_Rank], hung: list[int], timeout_s: float) -> str:
    """Ask each hung rank for its stacks by signal, which works even while it is stuck inside a collective."""
    for i in hung:
        ranks[i].process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + STACK_DUMP_S
    while time.monotonic() < deadline and any(STACKS not in ranks[i].process.err for i in hung):
        time.sleep(0.05)
    time.sleep(0.05)  # the dump is written line by line
    stacks = [f"rank {i}:\n{_said(ranks[i])}" for i in hung]
    return f"ranks {hung} of {len(ranks)} did not finish within {timeout_s} s\n" + "\n".join(stacks)


def _said(rank: _Rank) -> str:
    return f"{rank.process.out[-6000:]}{rank.process.err[-6000:]}"
