"""The interface through which estimates ask for times.

`memo.estimate` has no model of time and must not import one, so the caller (`memo estimate`) gives it. Without one the
columns of time stay empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from memo.config import RunConfig
from memo.estimate.accounts import Account
from memo.estimate.hardware import Hardware
from memo.estimate.verdict import Capacity


@dataclass(frozen=True)
class Timing:
    """Foreseen speed of one optimizer step.

    Attributes:
        tflops_per_gpu, mfu_percent: model FLOPs alone, with the causal half of attention, as training logs them (the
            4D paper counts all of attention). MFU refers to the machine's bf16 peak.
        tgs: tokens per GPU per second.
    """

    step_time_s: float
    tflops_per_gpu: float
    mfu_percent: float
    tgs: float


class TimeModel(Protocol):
    """Times of a checked configuration with --device cuda on a machine."""

    def timing(
        self, config: RunConfig, world_size: int, hardware: Hardware, moved: Mapping[str, int] | None
    ) -> Timing | None:
        """Times of one step, or None if the model cannot foresee them; `moved`: tiles by group under alpha auto."""

    def moved(self, config: RunConfig, account: Account, hardware: Hardware, capacity: Capacity) -> Mapping[str, int]:
        """Tiles by group that --offload-alpha auto moves if not all activations fit on the GPU."""
