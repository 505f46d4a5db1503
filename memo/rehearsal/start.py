"""A process on the emulated GPU for each rank that is rehearsed. No torch: it may not even load without a GPU here."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from memo.emulated_gpu.launch import Device, environment
from memo.errors import EXIT_FAILED, EXIT_REFUSED, EmulatorError, MemoError
from memo.rehearsal.rehearsed import Rehearsed
from memo.rehearsal.request import Request

_SHOWN_CHARACTERS = 3000
_NO_VARIABLES: Mapping[str, str] = {}


def start(request: Request, device: Device, variables: Mapping[str, str] = _NO_VARIABLES) -> Rehearsed:
    """Rehearse one rank on an emulated GPU like `device`, under this process's environment and `variables`.

    Raises EmulatorError where the emulated GPU cannot be built or its process fails, and what memo train refuses, with
    its words and its exit status.
    """
    with tempfile.TemporaryDirectory(prefix="memo_rehearsal_") as folder:
        asked, found = Path(folder) / "request.json", Path(folder) / "rehearsed.json"
        request.save(str(asked))
        command = [sys.executable, "-m", "memo.rehearsal.child", str(asked), str(found)]
        env = {**environment(device, Path(folder) / "gpu.txt"), **variables}
        done = subprocess.run(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise _failure(done.returncode, done.stderr)
        return Rehearsed.load(str(found))


def _failure(status: int, said: str) -> MemoError:
    """What a process that ended with `status` said on standard error, as an error of this one."""
    words = re.split(r"^error: ", said, flags=re.MULTILINE)  # as memo.errors ends a command
    if status in (EXIT_REFUSED, EXIT_FAILED) and len(words) > 1:
        error = MemoError(words[-1].strip())
        error.exit_status = status
        return error
    error = EmulatorError(f"the rehearsed process ended with status {status}:\n{said[-_SHOWN_CHARACTERS:]}")
    error.exit_status = EXIT_FAILED
    return error
