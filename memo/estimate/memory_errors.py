"""The error of memory that memo foresees for its own program, against the bytes that torch's allocator gives out.

The program ran at full size on the emulated GPU (benchmarks/full_size.py), and in a few runs on one H200
(benchmarks/gpu_accuracy.py); tests hold the figures here to those rows.
"""

from typing import NamedTuple


class AccountError(NamedTuple):
    """The largest error of `runs` runs, as a share of the bytes that were foreseen to be allocated."""

    share: float
    runs: int

    def __str__(self) -> str:
        return (
            f"GPU GiB: ±{self.share:.2%}, the largest error in {self.runs} full-size runs on the emulated GPU; "
            f"{RUNS_ON_GPU} runs of one process on an H200 were within {WORST_ON_GPU:.2%}"
        )


WORST_ON_GPU, RUNS_ON_GPU = 0.0013, 8
"""The largest error on an H200, and the number of its runs. Their program kept 4 bytes a token more for the loss."""

FULL_SIZE = AccountError(0.0015, 50)
