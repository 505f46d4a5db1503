"""Extend a Hugging Face model to longer texts: `memo extend`, as a script for launchers that take one."""

import sys

from memo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["extend", *sys.argv[1:]]))
