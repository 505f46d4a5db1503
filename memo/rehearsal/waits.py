"""The places where the host may wait for the device in a training step (neither the first nor the last), and why."""

from collections.abc import Sequence

REASONS = {
    "memo.train.agreement.read_numbers": "loss, gradient norm, stop and failure come to the host together",
    "memo.executor.states.await_gradients": "the CPU updates what is in host memory: gradients have arrived there (one "
    "stream), and nobody reads the masters any more (the other)",
    "memo.executor.states.upload_weights": "the CPU casts masters into one of two stages: its last copy has left it",
    "memo.executor.layer_states.wait": "the optimizer's thread updates a layer as soon as its gradient has arrived",
}
"""{function of memo that waits or calls a function that waits: reason}. All other waits are unexpected."""


def reasoned(what: str, functions: Sequence[str]) -> str | None:
    """The entry of REASONS for a wait; None if the wait is unexpected, like all waits for copies from pageable memory.

    Args:
        what, functions: the fields of memo.emulated_gpu.face.HostWait.
    """
    return None if "pageable" in what else next((name for name in functions if name in REASONS), None)
