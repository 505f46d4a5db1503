"""Steps that are skipped because their gradients are not finite: how many in a row a run bears."""

from memo.config import RunConfig
from memo.errors import DivergenceError


def check_skips(config: RunConfig, iteration: int, consecutive_skips: int) -> None:
    """Raises DivergenceError when the last --max-consecutive-skips steps were all skipped; the same on all ranks.

    Where weights have become NaN every later step is skipped, so the run would go on for ever and learn nothing.
    """
    limit = config.training.max_consecutive_skips
    if limit == 0 or consecutive_skips < limit:
        return
    first = iteration - consecutive_skips + 1
    raise DivergenceError(
        f"iterations {first} to {iteration} were all skipped, because their gradient norm is not finite, and "
        f"--max-consecutive-skips is {limit}: go on with --load from a checkpoint before iteration {first}, with a "
        "lower --lr or after a look at the data since then; 0 lets a run go on for ever"
    )
