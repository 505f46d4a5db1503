"""The two moments of AdamW: their width between steps, and the scratch and traffic of an update.

exp_avg and exp_avg_sq are as wide as the masters, or in bf16 (--exp-avg-dtype, --exp-avg-sq-dtype). An update computes
in the width of the masters: it widens a piece of a moment in bf16, updates it, and rounds it to the nearest bf16.

    exp_avg     | piece | piece | piece | ..    2 bytes an element, for the whole run
    scratch             | piece |               as wide as the masters, during an update; one for each moment in bf16

No torch here.
"""

from memo.config import TrainingConfig
from memo.units import DTYPE_BYTES

PIECE = 1 << 20
"""Elements that an update widens at a time. Scratch for both moments is as large as the scratch that the norm of the
gradients took just before (memo_kernels.squared_norm), so the update needs no term in the account of memory; its 4 MiB
for each moment stay in a cache. AdamW on one core takes 1.26 times as long as with moments in fp32; 1.15 times with
half as many elements in a piece, and 1.9 times with four times as many (torch 2.13). On a GPU, where nothing was
measured, each piece costs launches."""


def moment_bytes(training: TrainingConfig, wide: int) -> tuple[int, int]:
    """Bytes of an element of exp_avg and of exp_avg_sq, where masters have `wide` bytes."""
    first, second = (
        wide if dtype == "fp32" else DTYPE_BYTES[dtype] for dtype in (training.exp_avg_dtype, training.exp_avg_sq_dtype)
    )
    return first, second


def update_bytes(training: TrainingConfig, wide: int) -> int:
    """Memory traffic of AdamW for one parameter: master, gradient and moments are read, all but the gradient written;
    scratch stays in a cache."""
    return 3 * wide + 2 * sum(moment_bytes(training, wide))


def update_kernels(training: TrainingConfig, wide: int, elements: int) -> int:
    """Kernels of AdamW for `elements` elements: its own, and two copies of each moment in bf16, for each piece."""
    narrow = sum(each != wide for each in moment_bytes(training, wide))
    return (1 + 2 * narrow) * -(-elements // PIECE) if narrow else 1
