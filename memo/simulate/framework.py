"""What decides the time of a step and differs between frameworks that train the same layers.

memo is the framework of every plan. Published runs of another one are foreseen with its own habits, so that what they
say of kernels and links is not mixed up with what memo does differently.
"""

from dataclasses import dataclass, replace

from memo.config.grid import AXES


@dataclass(frozen=True)
class Framework:
    """How one framework places ranks and sends messages.

    Attributes:
        order: axes of the rank grid, fastest first.
        waits_for_messages: whether a pipeline stage stops until what it sends has arrived and what it receives is
            there; otherwise both run beside compute.
        host_starts_kernels: whether a layer takes no less than the host needs to start its kernels, where their number
            is known.
        under_autograd: whether layers that do not swap run under autograd, which keeps what norms and activations make
            and runs all of a layer again where it is recomputed.
        has_unmeasured_host: whether published runs leave open what its host takes between kernels; see
            memo.estimate.time_errors.
        copies_layer_inputs: whether inputs of layers that are recomputed go to host memory and back on the stream that
            computes, so that compute stands still meanwhile.
    """

    order: tuple[str, ...] = AXES
    waits_for_messages: bool = False
    host_starts_kernels: bool = False
    under_autograd: bool = True
    has_unmeasured_host: bool = False
    copies_layer_inputs: bool = False


MEMO = Framework(host_starts_kernels=True, under_autograd=False, has_unmeasured_host=True)
"""memo.parallel.stage_messages posts receives ahead and sends beside compute."""

FSDP = Framework(has_unmeasured_host=True)
"""Trainers that shard torch's modules (prime-rl, TRL), as far as one node goes: gathers of weights are not counted."""

FSDP_OFFLOAD = replace(FSDP, copies_layer_inputs=True)
"""prime-rl's ac_offloading: what a checkpointed layer saves, which is its input, is copied by hooks of autograd that
have no stream of their own (src/prime_rl/utils/act_offloading.py)."""

MEGATRON_LM = Framework(waits_for_messages=True)
"""Megatron-LM's 1F1B without interleaving: after each forward and each backward a stage sends, receives and waits for
both (megatron/core/pipeline_parallel/p2p_communication.py).

Known error: the simulator places these waits where the stages wait for each other least (memo.spec.meetings).
"""
