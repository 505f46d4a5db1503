"""Runs that end before their last step, stopped or after too many skipped steps; and the end of process groups."""

import gc
from pathlib import Path

import torch.distributed as dist

from memo.checkpoint.run_state import RunState
from memo.config import RunConfig
from memo.errors import DivergenceError
from memo.train.outputs import goes_on


def stopped(config: RunConfig, by: str, iteration: int, saved: Path | None) -> str:
    """Say why a run ended before its last step and how to go on; `saved` is the last checkpoint of this start."""
    why = f"stopped by {by} at iteration {iteration} of {config.training.train_iters}"
    save = config.checkpoint.save
    if save is None:
        return f"{why}: nothing is saved, as --save is not given"
    again = "the same command" if goes_on(config.checkpoint) else f"the same command and --load {save}"
    if saved is None:
        return f"{why}, before its first step: nothing new to save; start again with the same command"
    return f"{why}, saved as {saved}: go on with {again}"


def check_skips(config: RunConfig, state: RunState) -> None:
    """Raises DivergenceError if the last --max-consecutive-skips steps were all skipped; the same on all ranks.

    Once a weight is NaN, every later step is skipped, so the run would go on for ever and learn nothing.
    """
    limit = config.training.max_consecutive_skips
    if limit == 0 or state.consecutive_skips < limit:
        return
    first = state.iteration - state.consecutive_skips + 1
    raise DivergenceError(
        f"iterations {first} to {state.iteration} were all skipped, because their gradient norm is not finite, and "
        f"--max-consecutive-skips is {limit}: go on with --load from a checkpoint before iteration {first}, with a "
        "lower --lr or after a look at the data since then; 0 lets a run go on for ever"
    )


def shutdown() -> None:
    """End the process groups, if any were started; drop all references to them before.

    gloo's threads free the tensors of the last messages at some later time. If that happens while the interpreter ends,
    the process aborts (exit status -6), so the groups and their threads end here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # a model is a reference cycle, and threads end with the last reference to their group
