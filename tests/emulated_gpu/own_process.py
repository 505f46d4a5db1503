"""Programs in processes of their own, on emulated GPUs of their own. A server forks them (fork_server.py)."""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import TCPStore

from memo.emulated_gpu.launch import LIBRARIES, Device, environment

DEFAULT = Device()
SERVER = Path(__file__).with_name("fork_server.py")
TIMEOUT_S = 840.0


class Process:
    """What it says is in files, so that nobody has to read it meanwhile."""

    def __init__(self, folder: Path, told: int) -> None:
        """`told`: the descriptor that the server tells the process id through, and the exit status at the end."""
        self._folder, self._told = folder, os.fdopen(told)
        self._status: int | None = None
        self.pid = int(self._told.readline())

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text(errors="replace")

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit status; the negative number of the signal that ended it. Raises AssertionError, and ends it."""
        if self._status is None:
            is_over = bool(select.select([self._told], [], [], timeout_s)[0])
            if not is_over:
                os.kill(self.pid, signal.SIGKILL)
            self._status = int(self._told.readline())
            self._told.close()
            assert is_over, f"process {self.pid} did not end within {timeout_s} s:\n{self.err[-6000:]}"
        return self._status

    def fileno(self) -> int:
        """Readable when it has ended."""
        return self._told.fileno()

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def start(
    tmp_path: Path,
    program: str | Path,
    device: Device | None = DEFAULT,
    arguments: Sequence[str] = (),
    **variables: str,
) -> Process:
    """The text of a Python program, or its file, on `device`, or on one like this process's own.

    `variables` are added to its environment.
    """
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    env = dict(os.environ) if device is None else environment(device, folder / "gpu.txt")
    what = {"file": str(program)} if isinstance(program, Path) else {"program": textwrap.dedent(program)}
    message = json.dumps({**what, "arguments": list(arguments), "environment": {**env, **variables}}).encode()
    ours, theirs = os.pipe()
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        socket.send_fds(_server(), [message], [out.fileno(), err.fileno(), theirs])
    os.close(theirs)
    return Process(folder, ours)


def run(
    tmp_path: Path,
    program: str | Path,
    device: Device | None = DEFAULT,
    arguments: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """As `start`; how it ended."""
    process = start(tmp_path, program, device, arguments, **variables)
    status = process.wait()
    return subprocess.CompletedProcess([str(program), *arguments], status, process.out, process.err)


def run_ranks(tmp_path: Path, num_ranks: int, program: Path, device: Device, arguments: Sequence[str]) -> list[str]:
    """What each rank prints. Ranks get the variables that torchrun sets, and a store as torchrun keeps one.

    Raises AssertionError with the errors of the first that fails; the others are ended.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    ranks = [
        start(tmp_path, program, device, arguments, RANK=str(rank), LOCAL_RANK=str(rank), **world)
        for rank in range(num_ranks)
    ]
    try:
        running = set(ranks)
        while running:
            ended, _, _ = select.select(list(running), [], [], TIMEOUT_S)
            for rank in ended or ranks[:1]:
                assert rank.wait(0) == 0, f"rank {ranks.index(rank)} of {num_ranks} failed:\n{rank.err[-6000:]}"
                running.remove(rank)
        return [rank.out for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@functools.cache
def _server() -> socket.socket:
    """Its requests are messages, which stay whole. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # torch does not touch the emulated GPU when it is imported there, and whatever else did would be refused.
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "EMULATED_GPU": "/nonexistent", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SERVER), str(theirs.fileno())]
    server = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(lambda: (ours.close(), server.wait()))
    return ours


def outside() -> dict[str, str]:
    """The environment of this process as it was before it ran on the emulated GPU: that of a user's shell.

    Its cache is the one that the libraries are in, so that they are not built once more.
    """
    folder = os.environ[LIBRARIES]
    env = {**os.environ, "XDG_CACHE_HOME": str(Path(folder).parents[2])}
    for name in (LIBRARIES, "EMULATED_GPU"):
        del env[name]
    for name, separator in (("LD_PRELOAD", ":"), ("PYTHONPATH", os.pathsep)):
        env[name] = separator.join(path for path in env[name].split(separator) if not path.startswith(folder))
    return env
