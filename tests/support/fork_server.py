"""A server that forks programs from a process that has imported torch and memo: python fork_server.py DESCRIPTOR

These imports take three to five seconds of a core, and tests start more than a thousand processes. All processes of a
run of pytest share one server, which imports when it is first asked. On emulated GPUs each forked program has a GPU of
its own: the settings of the GPU are read when they are first needed, which is never in the server, and the code that
torch runs at its import on an emulated GPU runs after the fork.

The descriptor is a Unix socket that takes connections (forked.py). When the first of them ends, all end: the server,
which leads a process group, and what it forked. Each message asks for one process: JSON of `file`, `module` or
`program`, `arguments`, and `environment`, with the descriptors of a pipe into which the server writes its process id,
and its exit status when it has ended; of its standard output; of its standard errors; and of others, whose numbers are
added to its arguments.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from memo.emulated_gpu.launch import is_emulated

PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # by torch.autograd.grad when it is first called: a second of each rank
    *("numpy.ma", "numpy.random", "encodings.ascii"),
    "memo.train.entry",
    "memo.train.trainer",
    *(f"memo_kernels.{name}.reference" for name in ("activation", "cross_entropy", "norm", "rope")),
    "psutil",
    "spared_measurements",
    "ranks",
]
MOST_BYTES = 1 << 20
"""Most bytes of a message."""
MOST_DESCRIPTORS = 8
MADV_COLLAPSE = 25


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork on requests. Returns only in forked processes, with their request."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    first = listener.accept()[0]
    selector.register(first, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
            elif key.data:
                process, told = key.data
                tell(told, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
                selector.unregister(key.fd)
                os.close(key.fd)
                os.close(told)
            else:
                message, descriptors, _, _ = socket.recv_fds(key.fileobj, MOST_BYTES, MOST_DESCRIPTORS)
                if not message and key.fileobj is first:
                    os.killpg(0, signal.SIGKILL)
                elif not message:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                elif (process := fork()) == 0:
                    for inherited in list(selector.get_map()):
                        os.close(inherited)
                    return begin(json.loads(message), descriptors)
                else:
                    told, *others = descriptors
                    for descriptor in others:
                        os.close(descriptor)
                    tell(told, process)
                    selector.register(os.pidfd_open(process), selectors.EVENT_READ, (process, told))


def tell(told: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked has ended
        os.write(told, b"%d\n" % number)


def fork() -> int:
    """Fork a process that has imported what most tests need; the first call imports it."""
    if "spared_measurements" not in sys.modules:
        for name in PRELOAD:
            importlib.import_module(name)
        # Garbage collection would visit, and so copy, every page that a process shares with the server.
        gc.freeze()
        collapse_pages()
    return os.fork()


def collapse_pages() -> None:
    """Move this process's memory into huge pages, where Linux can: a fork copies a table entry for each page.

    That halves the 25 ms of a core that a forked process takes at its start and its end.
    """
    madvise, size = ctypes.CDLL(None).madvise, 1 << 21
    for region in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = region.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for address in range(-(-begin // size) * size, end - size + 1, size):
                madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_COLLAPSE)


def begin(request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    """Give a forked process the output, environment and arguments of a fresh one."""
    told, output, errors, *others = descriptors
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in (output, errors, told):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request.get("file", "-c"), *request["arguments"], *map(str, others)]
    return request


def run(request: dict[str, Any]) -> None:
    if is_emulated():
        from memo.emulated_gpu import face

        face.autoload()
    # The interpreter has put the folder of this file first in sys.path.
    sys.path[0] = str(Path(request["file"]).parent) if "file" in request else ""
    if "file" in request:
        runpy.run_path(request["file"], run_name="__main__")
    elif "module" in request:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        exec(compile(request["program"], "<string>", "exec"), {"__name__": "__main__"})


def end(status: int) -> NoReturn:
    """Do what an interpreter does at its end, except to take down the modules: with torch's that takes 0.4 s of a core.

    Processes that torchrun starts, those of subprocess.run, and those on emulated GPUs end in full.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def share_cores() -> None:
    """Let no thread of this process, or of those that it forks, take a core from another one when it wakes.

    gloo's thread that waits for messages wakes when one has come. If the thread that it took the core from holds the
    lock of the connection, gloo's asks again and again until its time on the core is over: a thousand messages between
    two ranks took 1.4 s of a core, and take 0.05 s.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it; all else is the same
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    share_cores()
    try:
        run(serve(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as asked:
        if is_emulated() or not isinstance(asked.code, int):
            raise
        end(asked.code)
    if not is_emulated():
        end(0)
