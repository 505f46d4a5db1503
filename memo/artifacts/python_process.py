"""How memo starts another process of Python, without the working directory on its path.

`python -m` and `python -c` put the working directory first on the path, where a folder of strangers may have a json.py.
"""

import json
import sys
from pathlib import Path

_SET_PATH = (
    "import json, sys; given = json.loads(sys.argv.pop(1)); "
    "sys.path[:] = [path for path in sys.path if path not in given] + given; "
)
"""A path that PYTHONPATH names for the process alone stands first, as that variable has it."""


def python_command(program: str, *arguments: str) -> list[str]:
    """The command that runs `program`, source code, which finds modules where this process does.

    Entries of the path that mean the working directory are left out, as Python adds them unasked.
    """
    path = [entry for entry in sys.path if entry not in ("", ".")]
    package = str(Path(__file__).parents[2])
    given = path if package in path else [*path, package]
    return [sys.executable, "-P", "-c", _SET_PATH + program, json.dumps(given), *arguments]
