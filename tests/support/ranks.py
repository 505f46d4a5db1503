"""Run a function on several ranks: a fresh process per rank and call, forked from a server that has torch.

A fork server with torch preloaded starts a rank in tens of milliseconds, where a spawned interpreter needs
seconds; plain fork is no choice because it hangs once the parent has run OpenMP threads.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # by torch.autograd.grad when it is first called: a second of each rank
    "memo.train.trainer",
]
STACK_DUMP_S = 30.0
"""Longest wait for the stacks of a hung rank."""
TIMEOUT_S = 600.0
"""Tells of ranks that hang. Slow ones on a busy machine need a tenth of it."""


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds its traceback or stacks."""


class _Rank(NamedTuple):
    process: ForkServerProcess
    connection: Connection
    stacks: Path


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # Plain pickle, because multiprocessing's own would share tensors through memory that dies with its
    # process.
    task = pickle.dumps((fn, args, kwargs))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(context, rank, world_size, Path(folder), task) for rank in range(world_size)]
        try:
            results = _collect(ranks, timeout_s)
            for rank in ranks:
                rank.process.join(timeout=60)
            return results
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.connection.close()


def _start(context: ForkServerContext, rank: int, world_size: int, folder: Path, task: bytes) -> _Rank:
    ours, theirs = context.Pipe()
    stacks = folder / f"stacks{rank}"
    process = context.Process(
        target=_rank_main, args=(rank, world_size, str(folder), task, theirs), daemon=True, name=f"rank{rank}"
    )
    process.start()
    theirs.close()
    return _Rank(process, ours, stacks)


def _rank_main(rank: int, world_size: int, folder: str, task: bytes, connection: Connection) -> None:
    # Garbage collection would visit, and so copy, every page that the rank shares with the server: 0.25 s of each rank.
    gc.freeze()
    import known_peak  # noqa: F401  not preloaded: the fork server does not find modules of the tests
    import torch
    import torch.distributed as dist

    stacks = open(Path(folder) / f"stacks{rank}", "w")  # noqa: SIM115  open until the end
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    same = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {**same, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(hours=1),  # run_ranks keeps the time: it can show every rank's stack
        )
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
                ranks[i].process.join()
                raise RankError(f"rank {i} died with exit code {ranks[i].process.exitcode}") from None
            if not succeeded:
                raise RankError(f"rank {i} of {len(ranks)} raised:\n{value}")
            results[i] = value
    return [results[i] for i in range(len(ranks))]


def _describe_hang(ranks: list[_Rank], hung: list[int], timeout_s: float) -> str:
    """Ask each hung rank for its stacks by signal, which works even while it is stuck inside a collective."""
    for i in hung:
        pid = ranks[i].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_DUMP_S
    while time.monotonic() < deadline and any(_size(ranks[i].stacks) == 0 for i in hung):
        time.sleep(0.05)
    time.sleep(0.05)  # the dump is written line by line
    stacks = [f"rank {i}:\n{_read(ranks[i].stacks)}" for i in hung]
    return f"ranks {hung} of {len(ranks)} did not finish within {timeout_s} s\n" + "\n".join(stacks)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else "(no stack: the rank had not started)"
