"""Differences between frameworks that train the same layers, as far as they decide the time of a step.

memo is the framework of every plan. Published runs of another framework are predicted with the settings of that
framework, so that the evidence on kernels and links is not mixed up with differences between the frameworks.
"""

from dataclasses import dataclass

from memo.config.grid import AXES


@dataclass(frozen=True)
class Framework:
    """How one framework places ranks and sends messages.

    Attributes:
        order: axes of the rank grid, fastest first.
        waits_for_messages: whether a pipeline stage stops until its sends and receives are complete; otherwise both
            run beside compute.
        host_starts_kernels: whether the number of kernels of a layer is known, so that the layer takes at least the
            time in which the host starts them.
        under_autograd: whether layers that do not swap run under autograd. It keeps the outputs of norms and
            activation functions, and runs a recomputed layer again as a whole.
        fuses: whether its norms, RoPE, activations and loss are assumed to be fused kernels, whatever --kernels says.
        makes_logits_again: whether the loss has a forward of its own, whose logits its backward makes again. The
            efficiencies of machines were chosen by published steps for which this was assumed. Known error: Megatron-LM
            keeps its logits, and passes over them more often.
        has_unmeasured_host: whether no published run tells the time of the host between kernels; see
            memo.estimate.time_errors.
    """

    order: tuple[str, ...] = AXES
    waits_for_messages: bool = False
    host_starts_kernels: bool = False
    under_autograd: bool = True
    fuses: bool = True
    makes_logits_again: bool = True
    has_unmeasured_host: bool = False


MEMO = Framework(
    host_starts_kernels=True, under_autograd=False, fuses=False, makes_logits_again=False, has_unmeasured_host=True
)
"""memo.parallel.stage_messages posts receives ahead and sends beside compute."""
