"""Ranks as processes of their own, started by hand or by torchrun, for tests of how they end."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from forked import ROOT, Kind, Process, fork

DEADLINE_S = 180.0
"""Longest wait for an event: on a busy machine, torch alone takes half a minute to load."""
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 64 "
    "--global-batch-size 4 --train-iters 100000 --lr 1e-3 --lr-decay-style constant --device cpu "
    "--num-threads 1 --peak-tflops 1 --no-progress --max-step-minutes 1000 --offload-alpha off"
)
"""Flags of a run that goes on until it is ended."""


@dataclass
class Ended:
    """Status and output of a process that has ended."""

    status: int
    errors: str


class Ranks:
    """Processes of one run; their standard errors go to files, so that no reader is needed while they run."""

    def __init__(self, processes: Sequence[Process], folder: Path) -> None:
        self.processes, self.folder = list(processes), folder

    def output(self, rank: int) -> str:
        return (self.folder / f"output{rank}").read_text(errors="replace")

    def errors(self, rank: int) -> str:
        return (self.folder / f"errors{rank}").read_text(errors="replace")

    def ended(self, rank: int, within_s: float = DEADLINE_S) -> Ended:
        """Wait for the end of one process."""
        try:
            status = self.processes[rank].wait(within_s)
        except AssertionError:
            raise AssertionError(f"rank {rank} did not end within {within_s} s:\n{self.errors(rank)}") from None
        return Ended(status, self.errors(rank))

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds; every process of the run must live until then."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            dead = [i for i, process in enumerate(self.processes) if process.poll() is not None]
            assert not dead, f"rank {dead[0]} ended before {what}:\n{self.errors(dead[0])}"
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.errors(0)}"
            time.sleep(0.05)


@contextmanager
def alone(folder: Path, program: tuple[Kind, str], flags: Sequence[str]) -> Iterator[Ranks]:
    """Start one process, like a user who knows of no ranks."""
    with _forked(folder, program, [flags], [{}]) as ranks:
        yield ranks


@contextmanager
def by_hand(
    world_size: int,
    folder: Path,
    program: tuple[Kind, str],
    flags: Sequence[str],
    extra: dict[int, Sequence[str]] | None = None,
) -> Iterator[Ranks]:
    """Start a program for each rank, as in one terminal each; `extra`: flags by rank."""
    same = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    arguments = [[*flags, *(extra or {}).get(rank, ())] for rank in range(world_size)]
    variables = [{**same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    with _forked(folder, program, arguments, variables) as ranks:
        yield ranks


@contextmanager
def _forked(
    folder: Path, program: tuple[Kind, str], arguments: Sequence[Sequence[str]], variables: Sequence[dict[str, str]]
) -> Iterator[Ranks]:
    """Start a process for each list of arguments, with these variables beside the test's own."""
    started: list[Process] = []
    try:
        for i, (own, more) in enumerate(zip(arguments, variables, strict=True)):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
            started.append(fork(*program, own, environment, folder / f"output{i}", folder / f"errors{i}"))
        yield Ranks(started, folder)
    finally:
        for process in started:
            process.kill()


@contextmanager
def by_torchrun(world_size: int, folder: Path, command: Sequence[str], *options: str) -> Iterator[Ranks]:
    """Start torchrun as one process; the output of its ranks is in its standard error."""
    arguments = ["--standalone", "--nproc-per-node", str(world_size), *options, *command]
    with agents(folder, [arguments]) as ranks:
        yield ranks


@contextmanager
def agents(folder: Path, arguments: Sequence[Sequence[str]]) -> Iterator[Ranks]:
    """Start a torchrun for each list of its arguments; the ranks that they start are interpreters of their own."""
    with _forked(folder, ("module", "torch.distributed.run"), arguments, [{}] * len(arguments)) as started:
        try:
            yield started
        finally:
            for process in started.processes:
                if process.poll() is None:
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()


def free_port() -> int:
    """Return a free port, for ranks that need the port before they start.

    It lies below the ports that systems give to a process that asks for any port, so no other test gets it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as listener, suppress(OSError):  # taken: try another
            listener.bind(("", port))
            return port
