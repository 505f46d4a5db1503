"""Where a model of time plugs into estimates: a function of the configuration and the machine, given from above.

`memo.estimate` knows no such model. `memo estimate` hands one in for the method `memo`; without one the columns of
time stay empty.
"""

from collections.abc import Callable
from dataclasses import dataclass

from memo.config import RunConfig
from memo.estimate.hardware import Hardware


@dataclass(frozen=True)
class Timing:
    """One optimizer step.

    Attributes:
        tflops_per_gpu, mfu_percent: model FLOPs alone, as training logs them; MFU against the machine's bf16 peak.
        tgs: tokens per GPU per second.
    """

    step_time_s: float
    tflops_per_gpu: float
    mfu_percent: float
    tgs: float


TimeModel = Callable[[RunConfig, int, Hardware], Timing]
"""(configuration with --device cuda, world size, machine) -> one step. Raises ConfigError where it cannot tell."""
