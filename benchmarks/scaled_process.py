"""A process of the scaled node that takes a turn on request, so that many processes can take turns on one core.

Process starts `python benchmarks/scaled_process.py JSON`. This program answers each line that it reads, "turn" or
"end", with a line of JSON.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any

from measure import Case
from scaled_pieces import piece_turns
from scaled_steps import Work, way_turns

from memo.errors import HostMemoryError, OutOfMemory, PlanError
from memo.train.oom import is_out_of_memory

_TIMEOUT_S = 3600
_QUIET_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Let glibc keep freed memory, as a GPU's allocator does; new pages for every tensor would slow down the ideal most."""

PIECES = "pieces"
"""Name, in place of a way, of a process whose turns measure pieces of steps."""


class NoRoom(Exception):
    """A way did not fit into the device's memory ("oom"), or the host's ("oohm")."""


class Process:
    """A process that the constructor starts and the end of the context ends; the first turn is ready after `__init__`.

    Every call raises NoRoom if the way runs out of memory, and SystemExit with its message if it fails otherwise.
    """

    def __init__(self, work: Work) -> None:
        self._way = work.case.way
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with this object)
        self._child = subprocess.Popen(
            [sys.executable, __file__, json.dumps(dataclasses.asdict(work))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env={**os.environ, **_QUIET_MALLOC},
        )
        self._read()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._child.kill()
        self._child.wait()
        self._complaints.close()

    def turn(self) -> dict[str, Any]:
        return self._ask("turn")

    def end(self) -> dict[str, Any]:
        return self._ask("end")

    def _ask(self, request: str) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{request}\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        late = threading.Timer(_TIMEOUT_S, self._child.kill)
        late.start()
        answer = self._child.stdout.readline()
        late.cancel()
        if not answer:
            self._complaints.seek(0)
            complaints = self._complaints.read().splitlines()
            raise SystemExit(f"{self._way}: {complaints[-1] if complaints else 'it ended, or took too long'}")
        found: dict[str, Any] = json.loads(answer)
        if "out_of_memory" in found:
            raise NoRoom(found["out_of_memory"])
        return found


def main() -> None:
    given = json.loads(sys.argv[1])
    work = Work(Case(**given.pop("case")), **given)
    answers, sys.stdout = sys.stdout, sys.stderr  # the output of the trainer is no answer

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        with piece_turns(work) if work.case.way == PIECES else way_turns(work) as turns:
            answer({})
            for request in sys.stdin:
                answer(turns.end() if request.strip() == "end" else turns.turn())
    except HostMemoryError:
        answer({"out_of_memory": "oohm"})
    except Exception as error:
        refused = isinstance(error, PlanError) and str(error).startswith("device memory")  # memo raises before it runs
        if not refused and not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
            raise
        answer({"out_of_memory": "oom"})


if __name__ == "__main__":
    main()
