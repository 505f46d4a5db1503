"""Starts a process on the emulated GPU to rehearse one rank. No torch, because its CUDA build may not load here."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from memo.artifacts.python_process import python_command
from memo.emulated_gpu.launch import Device, environment
from memo.errors import EXIT_FAILED, EXIT_REFUSED, EmulatorError, MemoError
from memo.rehearsal.rehearsed import Rehearsed
from memo.rehearsal.request import RehearsalRequest

_SHOWN_CHARACTERS = 3000
_NO_VARIABLES: Mapping[str, str] = {}


def start(request: RehearsalRequest, device: Device, variables: Mapping[str, str] = _NO_VARIABLES) -> Rehearsed:
    """Rehearse one rank on the emulated GPU `device`, with this process's environment and `variables`.

    Raises EmulatorError if the emulated GPU cannot be built or its process fails, and the errors of memo train with
    their messages and exit status.
    """
    with tempfile.TemporaryDirectory(prefix="memo_rehearsal_") as folder:
        asked, found = Path(folder) / "request.json", Path(folder) / "rehearsed.json"
        request.save(str(asked))
        program = "import sys; from memo.rehearsal.child import main; sys.exit(main())"
        command = python_command(program, str(asked), str(found))
        env = {**environment(device, Path(folder) / "gpu.txt"), **variables}
        done = subprocess.run(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise _failure(done.returncode, done.stderr)
        return Rehearsed.load(str(found))


def _failure(status: int, output: str) -> MemoError:
    """The error of a process that ended with `status` and wrote `output` on standard error."""
    parts = re.split(r"^error: ", output, flags=re.MULTILINE)  # as memo.errors prints it
    if status in (EXIT_REFUSED, EXIT_FAILED) and len(parts) > 1:
        error = MemoError(parts[-1].strip())
        error.exit_status = status
        return error
    error = EmulatorError(f"the rehearsed process ended with status {status}:\n{output[-_SHOWN_CHARACTERS:]}")
    error.exit_status = EXIT_FAILED
    return error
