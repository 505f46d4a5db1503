"""A server that forks programs from a process that has imported torch and memo: python fork_server.py DESCRIPTOR

These imports take three to five seconds of a core, and tests start a hundred processes. On emulated GPUs each forked
program has a GPU of its own: the settings of the GPU are read when they are first needed, which is never in the server,
and the code that torch runs at its import on an emulated GPU runs after the fork.

The descriptor is a Unix socket of messages. Each asks for one process: JSON of `file`, `module` or `program`,
`arguments`, and `environment`, with the descriptors of its standard output, of its standard errors, and of a pipe into
which the server writes its process id, and its exit status when it has ended (forked.py).
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from ranks import PRELOAD

from memo.emulated_gpu.launch import is_emulated

MOST_BYTES = 1 << 20
"""Most bytes of a message."""


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork on requests. Returns only in forked processes, with their request; the server ends with its socket."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is requests:
                message, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
                if not message:
                    os._exit(0)
                if (process := os.fork()) == 0:
                    selector.close()
                    requests.close()
                    return begin(json.loads(message), descriptors)
                *outputs, told = descriptors
                for output in outputs:
                    os.close(output)
                os.write(told, b"%d\n" % process)
                selector.register(os.pidfd_open(process), selectors.EVENT_READ, (process, told))
            else:
                process, told = key.data
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                os.write(told, b"%d\n" % status)
                selector.unregister(key.fd)
                os.close(key.fd)
                os.close(told)


def begin(request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    """Give a forked process the output, environment and arguments of a fresh one."""
    output, errors, told = descriptors
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in (output, errors, told):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request.get("file", "-c"), *request["arguments"]]
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


if __name__ == "__main__":
    for name in (*PRELOAD, "known_peak"):
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        asked = serve(requests)
    run(asked)
