"""Programs in processes of their own, forked by a server that has imported torch and memo (fork_server.py).

They begin with the environment and the arguments of a fresh interpreter, and end like a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # pytest, which starts the server for its workers, has no need of torch
    from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("fork_server.py")
ADDRESS = "MEMO_TESTS_FORK_SERVER"
"""The environment variable of the name of the server's socket, which all processes of this run of pytest use."""
TIMEOUT_S = 840.0

Kind = Literal["file", "module", "program"]
"""Kind of a program: a Python file, a module of `python -m`, or the text of a program."""


class Process:
    """A forked process. Its output goes to files, so that no reader is needed while it runs."""

    def __init__(self, out: Path, err: Path, told: int) -> None:
        """`told`: the descriptor from which the process id, and at the end the exit status, are read."""
        self._out, self._err, self._told = out, err, os.fdopen(told)
        self._status: int | None = None
        self.pid = int(self._told.readline())

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit status, or the negative number of the signal that ended it; None while it runs."""
        if self._status is None and select.select([self._told], [], [], timeout_s)[0]:
            self._status = int(self._told.readline())
            self._told.close()
        return self._status

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end, and return as `poll`. If time runs out, end the process and raise AssertionError."""
        status = self.poll(timeout_s)
        if status is None:
            self.kill()
            raise AssertionError(f"process {self.pid} did not end within {timeout_s} s:\n{self.err[-6000:]}")
        return status

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has ended."""
        return self._told.fileno()

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have just ended
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            self.poll(TIMEOUT_S)


def fork(
    kind: Kind,
    what: str | Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: Path,
    err: Path,
    *descriptors: int,
) -> Process:
    """Start a program with exactly this environment; its output goes to `out` and `err`.

    It gets copies of `descriptors`, whose numbers are its last arguments.
    """
    request = {kind: str(what), "arguments": list(arguments), "environment": dict(environment)}
    ours, theirs = os.pipe()
    with open(out, "wb") as out_file, open(err, "wb") as err_file:
        sent = [theirs, out_file.fileno(), err_file.fileno(), *descriptors]
        socket.send_fds(server(), [json.dumps(request).encode()], sent)
    os.close(theirs)
    return Process(out, err, ours)


def world(num_ranks: int, store: TCPStore) -> list[dict[str, str]]:
    """Return by rank the variables that torchrun sets on one node whose store it keeps."""
    same = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    same |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    return [{**same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def own_store() -> TCPStore:
    """Return a store like that of torchrun for its ranks, at a port that no other process can take."""
    from torch.distributed import TCPStore

    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def finish(ranks: Sequence[Process]) -> None:
    """Wait for all ranks. Raises AssertionError with the errors of the first rank that fails, and ends the others."""
    try:
        running = set(ranks)
        while running:
            ended, _, _ = select.select(list(running), [], [], TIMEOUT_S)
            for rank in ended or ranks[:1]:
                assert rank.wait(0) == 0, f"rank {ranks.index(rank)} of {len(ranks)} failed:\n{rank.err[-6000:]}"
                running.remove(rank)
    finally:
        for rank in ranks:
            rank.kill()


@functools.cache
def server() -> socket.socket:
    """Return a connection to the server of this run, which keeps messages whole.

    Processes that the first caller starts later share its server, which ends with the first caller.
    """
    if starts := ADDRESS not in os.environ:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # Linux gives it a name that no other has
            listener.listen()
            os.environ[ADDRESS] = listener.getsockname()[1:].decode()
            # torch does not touch an emulated GPU at its import in the server, and other access would be refused.
            own = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "EMULATED_GPU": "/nonexistent", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(SERVER), str(listener.fileno())]
            passed = [listener.fileno()]
            process = subprocess.Popen(command, env=os.environ | own, cwd=ROOT, pass_fds=passed, start_new_session=True)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{os.environ[ADDRESS]}")
    if starts:
        atexit.register(lambda: (connection.close(), process.wait()))
    return connection
