"""Starts training from the command line: `memo train` and examples/pretrain_gpt.py.

Loading torch takes seconds, so a single process loads it once its flags are checked. One of several ranks needs it
before, to tell the other ranks about bad flags.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import partial

from memo.artifacts.regular_file import removed_if_unused
from memo.config.flags import load_run
from memo.data.find import check_corpora
from memo.data.pairs_of_run import build_pairs_of_run, check_corpora_learned, pairs_file
from memo.errors import exit_on_error
from memo.train.outputs import check_files
from memo.train.stop import GracefulStop


def main(argv: Sequence[str] | None = None, prog: str = "memo train") -> int:
    """Train as the flags say; returns the exit status.

    Refused flags and later failures (a full disk, a step that does not fit into memory) end with one message and an
    exit status of memo.errors. Signals are listened for from here to the end of close(). `prog` is the command that
    started this program, for help and messages.
    """
    with exit_on_error(needs_output=False), GracefulStop().listening() as stop, contextlib.ExitStack() as refused:
        with _refusals_are_heard():
            config = load_run(sys.argv[1:] if argv is None else argv, prog=prog)
            refused.enter_context(removed_if_unused(config.checkpoint.save))
            file = pairs_file(config)
            if file is not None:
                check_files(config)
            else:
                check_corpora(config)
                check_corpora_learned(config)
        from memo.train.first_rank import on_first_rank
        from memo.train.trainer import Trainer

        if file is not None:
            prefix = f"{config.checkpoint.save}/data/pairs"
            on_first_rank(partial(build_pairs_of_run, config, file, prefix))
            config = config.override({"data_path": prefix})
        with Trainer(config=config, stop=stop) as trainer:
            trainer.print_header()
            trainer.train()
    return 0


def _refusals_are_heard() -> contextlib.AbstractContextManager[None]:
    """memo.mesh.refusals_are_heard where there are other ranks to hear."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return contextlib.nullcontext()
    from memo.mesh import refusals_are_heard

    return refusals_are_heard()
