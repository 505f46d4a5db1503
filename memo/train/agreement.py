"""What all ranks learn of a training step, in one message among them and one wait of the host for the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from memo.mesh import Mesh
from memo.parallel.collectives import all_reduce
from memo.train.stop import GracefulStop


class Agreement:
    """The loss and the end of the run, read together with the gradient norm: before that the host runs ahead.

    Attributes:
        loss: of the global batch.
        stops: any rank was asked to stop, so all do, after the same step.
        failed: any rank has learned that a checkpoint could not be written; all raise that CheckpointError.
    """

    def __init__(self, mesh: Mesh, stop: GracefulStop, has_failed: Callable[[], bool]) -> None:
        """`has_failed`: whether this rank has learned that a checkpoint could not be written; it never waits."""
        self.mesh, self._stop, self._has_failed = mesh, stop, has_failed
        self.loss, self.stops, self.failed = 0.0, False, False
        self._sent: list[Tensor] = []

    def send(self, loss_sum: Tensor) -> None:
        """This rank's share of the loss, and what it was asked; tp ranks hold the same share, so one of them counts."""
        counted = loss_sum.double() * (self.mesh.at.tp == 0)
        flags = (self._stop.requested, self._has_failed())
        asked = [torch.full_like(counted, float(flag)) for flag in flags]
        self._sent = [all_reduce(torch.stack([counted, *asked]), self.mesh.world)]

    def read(self, norm: Tensor) -> float:
        """`norm` (fp64 scalar) on the host, and with it what was sent: the attributes are those of this step."""
        numbers = torch.cat([norm.unsqueeze(0), *self._sent])
        self._sent.clear()  # what a step asks for ends with it, as memory plans want
        norm_value, self.loss, stops, failed = read_numbers(numbers)
        self.stops, self.failed = stops > 0, failed > 0
        return norm_value


def read_numbers(values: Tensor) -> list[float]:
    """`values` [k] on the host, by way of pinned memory; waits for the current stream."""
    on_host = values.to("cpu", non_blocking=True)
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()
    numbers: list[float] = on_host.tolist()
    return numbers
