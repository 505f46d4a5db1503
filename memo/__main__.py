"""`python -m memo` is the command `memo`."""

from memo.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
