"""Shares the results of a training step among all ranks, with one message and one wait of the host for the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from memo.mesh import Mesh
from memo.parallel.collectives import all_reduce
from memo.train.stop import GracefulStop


class Agreement:
    """Loss and requests of a step, which the host reads together with the gradient norm.

    Attributes:
        loss: of the global batch.
        stops: some rank was asked to stop, so all ranks stop after the same step.
        failed: on some rank a checkpoint could not be written; all ranks raise that CheckpointError.
        saves: by the clock of the rank that decides, it is time for a checkpoint; all ranks save after the same step.
        figures: what `send` was given besides, which all ranks have alike.
    """

    def __init__(
        self, mesh: Mesh, stop: GracefulStop, has_failed: Callable[[], bool], is_save_due: Callable[[], bool]
    ) -> None:
        """What is asked in every step and never waits.

        Args:
            has_failed: whether this rank's checkpoint could not be written.
            is_save_due: whether it is time for one; clocks differ, so one rank alone may say so.
        """
        self.mesh, self._stop, self._has_failed, self._is_save_due = mesh, stop, has_failed, is_save_due
        self.loss, self.stops, self.failed, self.saves = 0.0, False, False, False
        self.figures: list[float] = []
        self._sent: list[Tensor] = []

    def send(self, loss_sum: Tensor, figures: Tensor | None = None) -> None:
        """Start the sum of loss and requests over all ranks. tp ranks have the same share of the loss; one counts.

        `figures` [k] fp64 come to the host as well.
        """
        counted = loss_sum.double() * (self.mesh.at.tp == 0)
        flags = (self._stop.requested, self._has_failed(), self._is_save_due())
        asked = [torch.full_like(counted, float(flag)) for flag in flags]
        self._sent = [all_reduce(torch.stack([counted, *asked]), self.mesh.world)]
        self._sent += [] if figures is None else [figures]

    def read(self, norm: Tensor) -> float:
        """Bring `norm` (fp64 scalar) to the host, with what was sent; then the attributes are those of this step."""
        numbers = torch.cat([norm.unsqueeze(0), *self._sent])
        self._sent.clear()  # memory plans need what a step allocates to be freed in it
        norm_value, self.loss, *asked = read_numbers(numbers)
        self.stops, self.failed, self.saves = (count > 0 for count in asked[:3])
        self.figures = asked[3:]
        return norm_value


def on_any_rank(holds: bool, mesh: Mesh, device: torch.device) -> bool:
    """Whether something holds on at least one rank. Collective, outside steps: the host waits for the message."""
    return bool(all_reduce(torch.tensor(float(holds), device=device), mesh.world, "max") > 0)


def read_numbers(values: Tensor) -> list[float]:
    """`values` [k] on the host, by way of pinned memory; waits for the current stream."""
    on_host = values.to("cpu", non_blocking=True)
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()
    numbers: list[float] = on_host.tolist()
    return numbers
