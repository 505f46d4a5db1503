"""Starts a process of Python without the working directory on its path.

`python -m` and `python -c` put the working directory first on the path, and an untrusted folder may have a json.py.
"""

import json
import sys
from pathlib import Path

_SET_PATH = (
    "import json, sys; given = json.loads(sys.argv.pop(1)); "
    "sys.path[:] = [path for path in sys.path if path not in given] + given; "
)
"""Entries that PYTHONPATH adds for the new process come first, as usual for that variable."""


def python_command(program: str, *arguments: str) -> list[str]:
    """The command that runs the source code `program` with this process's path of modules.

    Entries that mean the working directory are left out, because Python adds them by itself.
    """
    path = [entry for entry in sys.path if entry not in ("", ".")]
    package = str(Path(__file__).parents[2])
    given = path if package in path else [*path, package]
    return [sys.executable, "-P", "-c", _SET_PATH + program, json.dumps(given), *arguments]
