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
        stops: whether some rank was asked to stop; all ranks then stop after the same step.
        failed: whether some rank could not write a checkpoint; all ranks then raise CheckpointError.
        saves: whether a checkpoint is due by the deciding rank's clock; all ranks then save after the same step.
        figures: the further numbers that `send` was given; they are equal on all ranks.
    """

    def __init__(
        self, mesh: Mesh, stop: GracefulStop, has_failed: Callable[[], bool], is_save_due: Callable[[], bool]
    ) -> None:
        """Both functions are called in every step and must not wait. `has_failed` tells whether this rank could not
        write its checkpoint; `is_save_due` is true on one rank at most, because the clocks of ranks differ."""
        self.mesh, self._stop, self._has_failed, self._is_save_due = mesh, stop, has_failed, is_save_due
        self.loss, self.stops, self.failed, self.saves = 0.0, False, False, False
        self.figures: list[float] = []
        self._sent: list[Tensor] = []

    def send(self, loss_sum: Tensor, figures: Tensor | None = None) -> None:
        """Start the sum of loss and requests over all ranks. All tp ranks have the same loss, so one of them counts.

        `read` brings `figures` [k] fp64 to the host as well.
        """
        counted = loss_sum.double() * (self.mesh.at.tp == 0)
        flags = (self._stop.requested, self._has_failed(), self._is_save_due())
        asked = [torch.full_like(counted, float(flag)) for flag in flags]
        self._sent = [all_reduce(torch.stack([counted, *asked]), self.mesh.world)]
        self._sent += [] if figures is None else [figures]

    def read(self, norm: Tensor) -> float:
        """Bring `norm` (fp64 scalar) and all that was sent to the host; sets the attributes to those of this step."""
        numbers = torch.cat([norm.unsqueeze(0), *self._sent])
        self._sent.clear()  # a memory plan needs each tensor of a step to be freed in this step
        norm_value, self.loss, *asked = read_numbers(numbers)
        self.stops, self.failed, self.saves = (count > 0 for count in asked[:3])
        self.figures = asked[3:]
        return norm_value


def on_any_rank(holds: bool, mesh: Mesh, device: torch.device) -> bool:
    """Whether `holds` is true on at least one rank. Collective; the host waits, so it is not for use within steps."""
    return bool(all_reduce(torch.tensor(float(holds), device=device), mesh.world, "max") > 0)


def read_numbers(values: Tensor) -> list[float]:
    """Copy `values` [k] to the host through pinned memory; waits for the current stream."""
    on_host = values.to("cpu", non_blocking=True)
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()
    numbers: list[float] = on_host.tolist()
    return numbers
