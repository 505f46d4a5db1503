"""How far a foreseen speed may lie from a measured one, by the published runs that the simulator was held against.

benchmarks/simulator_accuracy.py and benchmarks/held_out_accuracy.py compare both, run by run, and tests hold the
figures here to what they find. Efficiencies were fitted to the runs on A100, A800 and H100, not to those on B200. No
run of memo on a GPU is among them.
"""

from dataclasses import dataclass

from memo.estimate.hardware import Hardware
from memo.estimate.hardware_sxm import A100_40, AMPERE, B200, BLACKWELL, H100_94, HOPPER

TIE_SHARE = 0.05
"""Two plans of one machine whose foreseen speeds differ by less are as good as each other.

Of published pairs of layouts (same model, machine and number of GPUs) that were foreseen so near each other, the one
foreseen to be faster was slower in three of ten; of pairs foreseen further apart, in one of twenty-one.
"""


@dataclass(frozen=True)
class TimeError:
    """Nine of ten of so many published runs lay within this share of the throughput foreseen for them."""

    share: float
    runs: int
    source: str

    def __str__(self) -> str:
        return f"speeds ±{self.share:.0%}: nine of ten of {self.runs} {self.source} lay within"


_A100 = TimeError(0.19, 85, "published runs of Megatron-LM on A100 (the 4D paper's table 3)")
_H100 = TimeError(0.06, 60, "published runs of Megatron-LM on H100 (the 4D paper's table 4)")
_SWAPPED = TimeError(0.04, 30, "published runs of MEMO on A800 (its tables 3 and 4)")
_B200 = TimeError(0.15, 31, "published runs of Megatron-LM on B200 (SimuMax v1.2), none of which was fitted,")
_OTHERS = TimeError(
    0.30, 60, "published runs on H100, foreseen with A100's efficiencies as this machine is with another's,"
)
_KNOWN = {
    (A100_40.capability, AMPERE): _A100,
    (H100_94.capability, HOPPER): _H100,
    (B200.capability, BLACKWELL): _B200,
}


def time_error(hardware: Hardware, swaps: bool) -> TimeError:
    """Of plans for a machine; those that swap activations are held against MEMO's runs where these are of its chip.

    A machine of another chip, or with other efficiencies than those fitted to published runs, has the error that H100
    had before there were runs on it to fit.
    """
    found = _KNOWN.get((hardware.capability, hardware.efficiency), _OTHERS)
    return _SWAPPED if swaps and found is _A100 else found
