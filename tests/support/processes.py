"""Ranks as processes of their own, started by hand or by torchrun, where a test is about how they end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from forked import ROOT, Kind, Process, fork

DEADLINE_S = 180.0
"""Until something has happened: on a machine that is busy, torch alone takes half a minute to load."""
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 64 "
    "--global-batch-size 4 --train-iters 100000 --lr 1e-3 --lr-decay-style constant --device cpu "
    "--num-threads 1 --peak-tflops 1 --no-progress --max-step-minutes 1000 --offload-alpha off"
)
"""A run that goes on until it is ended."""


@dataclass
class Ended:
    """What is left of one process."""

    status: int
    errors: str


class Ranks:
    """Processes of one run; their standard errors are in files, so that nobody has to read them meanwhile."""

    def __init__(self, processes: Sequence[Process | subprocess.Popen[bytes]], folder: Path) -> None:
        self.processes, self.folder = list(processes), folder

    def output(self, rank: int) -> str:
        return (self.folder / f"output{rank}").read_text(errors="replace")

    def errors(self, rank: int) -> str:
        return (self.folder / f"errors{rank}").read_text(errors="replace")

    def ended(self, rank: int, within_s: float = DEADLINE_S) -> Ended:
        """Wait for the end of one process."""
        try:
            status = self.processes[rank].wait(within_s)
        except (subprocess.TimeoutExpired, AssertionError):
            raise AssertionError(f"rank {rank} did not end within {within_s} s:\n{self.errors(rank)}") from None
        return Ended(status, self.errors(rank))

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Until something has happened in a run of which every process lives."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            dead = [i for i, process in enumerate(self.processes) if process.poll() is not None]
            assert not dead, f"rank {dead[0]} ended before {what}:\n{self.errors(dead[0])}"
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.errors(0)}"
            time.sleep(0.05)


@contextmanager
def alone(folder: Path, program: tuple[Kind, str], flags: Sequence[str]) -> Iterator[Ranks]:
    """One process, as a user starts a program who knows of no ranks."""
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
    """A program for each rank, as somebody would start them in so many terminals; `extra` flags by rank."""
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
    """A process for each list of arguments, with these variables beside the test's own."""
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
    """One process, torchrun's; what its ranks say is in its errors."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(folder / "errors0", "wb") as errors, open(folder / "output0", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, *command], env=environment, cwd=ROOT, stdout=output, stderr=errors
        )
    try:
        yield Ranks([process], folder)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def free_port() -> int:
    """One that was free a moment ago, for ranks that have to be told one before they start."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])
