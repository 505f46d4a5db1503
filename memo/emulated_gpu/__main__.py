"""python -m memo.emulated_gpu [settings] -- command: run the command on an emulated GPU."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from memo.emulated_gpu.launch import Device, run
from memo.errors import exit_on_error


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the command; returns only if the command does not start."""
    parser = argparse.ArgumentParser(prog="python -m memo.emulated_gpu", description=__doc__)
    for field in fields(Device):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, after --")
    options = vars(parser.parse_args(argv))
    command = options.pop("command")
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        parser.error("there is no command to run: give it after --")
    with exit_on_error():
        run(Device(**options), command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
