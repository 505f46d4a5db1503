"""The passes over memory that torch's kernels make and a fused kernel does not.

A fused kernel (--kernels triton) reads and writes each value once. --kernels torch composes RoPE, gated activations,
the loss, and norms with wide weights of several kernels of torch (memo_kernels.*.reference), and each of these reads
its inputs and writes its outputs. tests/emulated_gpu/test_composed_passes.py counts their bytes.

A pass reads or writes a value once. Other frameworks are assumed to fuse (memo.simulate.framework). Known errors: on
CPUs torch composes RMSNorm too, which counts as fused here, and a kernel of its own widens or narrows logits.
"""

from typing import NamedTuple

from memo.config import RunConfig
from memo.simulate.kernels import Kernels


class Passes(NamedTuple):
    """Passes of a forward and of a backward, or of other pairs of kernels."""

    forward: float
    backward: float


_PASSES_OF_A_KERNEL = 2.5
"""A kernel of torch reads one or two values and writes one."""
NONE = Passes(0, 0)
FUSED_NORM = Passes(2, 3)
SUM_BEFORE_NORM = 1
"""Passes of a sum and a norm in two kernels beyond those of one: the sum is read once more."""
ROTATION = 4
"""Of RoPE over the channels that it rotates, forward or back: torch makes 6 passes, a fused kernel 2."""
_ACTIVATIONS = {"swiglu": Passes(2, 4), "geglu_tanh": Passes(2, 4), "swiglu_clamped": Passes(12, 14)}
"""Over the output of the activation. A fused kernel makes 3 passes over its output in forward and 5 in backward."""


def is_composed(config: RunConfig) -> bool:
    return config.hardware.kernels == "torch"


def passes_s(kernels: Kernels, passes: float, num_bytes: float) -> float:
    """Return the seconds of passes over a value of `num_bytes`."""
    return kernels.memory_s(passes * num_bytes, passes / _PASSES_OF_A_KERNEL)


def activation_passes(config: RunConfig) -> Passes:
    """Return the additional passes of an MLP's activation over its output."""
    return _ACTIVATIONS.get(config.model.activation, NONE) if is_composed(config) else NONE


def norm_passes(config: RunConfig, kernels: Kernels) -> Passes:
    """Return all passes of a norm over its input and its output.

    torch has fused kernels for norms whose weight has the dtype of the input. If the weight is wide, kernels of their
    own cast the input and the output, and in backward the gradients of both."""
    wide = kernels.wide / kernels.narrow
    is_wide = config.model.apply_layernorm_1p and wide > 1
    return Passes(2 + 4 * wide, 2 + 5 * wide) if is_composed(config) and is_wide else FUSED_NORM


def loss_passes(config: RunConfig, kernels: Kernels) -> Passes:
    """Return all passes over the logits of a chunk for its losses, and those more for its gradient.

    The head's product has written the logits. Fused kernels read them, and write their gradient over them. torch finds
    their maximum, subtracts it, and sums exponentials, of which a last kernel makes the gradient. A cap of logits takes
    six passes more, and its slopes eleven."""
    cap = Passes(6, 11) if config.model.final_logit_softcapping else NONE
    wide = kernels.wide / kernels.narrow
    own = Passes(2 + 4 * wide, 1 + wide) if is_composed(config) else Passes(1, 2)
    return Passes(own.forward + cap.forward, own.backward + cap.backward)
