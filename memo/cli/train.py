"""`memo train`: starts a run, like examples/pretrain_gpt.py."""

import os
from collections.abc import Sequence

from memo.config.flags import load_run
from memo.data.find import check_corpora
from memo.data.pairs_of_run import check_corpora_learned, pairs_file
from memo.train.stop import GracefulStop


def main(argv: Sequence[str]) -> int | None:
    """Returns the exit status of the run. Bad flags end it with status 2; in a single process before torch is loaded.

    Loading torch takes seconds, but one of several ranks needs it to tell the other ranks about bad flags.
    """
    with GracefulStop().listening() as stop:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            config = load_run(argv, prog="memo train")
            if pairs_file(config) is None:
                check_corpora(config)
                check_corpora_learned(config)
        from memo.train.entry import main as train

        return train(argv, stop)
