"""`memo train`: the same run as examples/pretrain_gpt.py."""

from collections.abc import Sequence

from memo.config.flags import load_run
from memo.train.stop import GracefulStop


def main(argv: Sequence[str]) -> int | None:
    """Exit status of the run. Bad flags end it with status 2 before torch is loaded, which takes seconds."""
    with GracefulStop().listening() as stop:
        load_run(argv, prog="memo train")
        from memo.train.entry import main as train

        return train(argv, stop)
