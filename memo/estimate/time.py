"""Time of one optimizer step, from FLOPs alone.

Known error: EFFICIENCY stands for everything that is not a matrix product, communication included. Long sequences on a
data-centre GPU reach 0.5 (MEMO, table 3); tiny models and slow links take several times as long.
"""

from memo.config import RunConfig
from memo.config.derived import num_microbatches
from memo.spec.flops import step_flops

EFFICIENCY = 0.5
"""Share of the peak that a rank reaches while it computes."""


def estimate_step_s(config: RunConfig, world_size: int, peak_flops: float) -> float:
    """Seconds of one step; `peak_flops` is the peak of one rank in FLOP/s.

    The pipeline idles for (pp - 1) / (microbatches x vpp) of its working time (Narayanan et al., 2021).
    """
    parallel = config.parallel
    working_s = step_flops(config, world_size) / (world_size * EFFICIENCY * peak_flops)
    bubble = (parallel.pp - 1) / (num_microbatches(config, world_size) * parallel.vpp)
    return working_s * (1.0 + bubble)
