"""Runs a pipeline schedule: forwards, backwards, and the messages between stages.

Every activation and every gradient that is sent has the same shape, [n, b, h], which is known before the step, so no
metadata is sent. At most two receives are posted and one send per link is in flight, so the buffers of a step do not
grow with the number of microbatches. `memo.spec.clock.simulate` checks that a schedule does not deadlock under
exactly these rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup, Work

from memo.mesh import Mesh
from memo.parallel.collectives import receive, send
from memo.spec.schedule import Action, Pipeline

ChunkForward = Callable[[Tensor | None, int], Tensor]
"""(input [n, b, h] or None at the first virtual stage, microbatch) -> output [n, b, h], at the last the loss."""

Enter = Callable[[Action], None]
"""Called with each action before anything is done for it."""


@dataclass(frozen=True)
class Wire:
    """Shape, dtype and device of the tensors that stages send to each other."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device


class PipelineStage:
    """One stage of a pipeline: executes its list of actions."""

    def __init__(self, pipeline: Pipeline, mesh: Mesh, wire: Wire) -> None:
        self.pipeline, self.mesh, self.wire = pipeline, mesh, wire
        self.stage = mesh.at.pp

    def run(self, actions: Sequence[Action], chunks: Sequence[ChunkForward], enter: Enter | None = None) -> Tensor:
        """Execute one step; returns the detached sum of this rank's losses (0 on a stage without the head).

        Gradients of parameters are left to autograd and its hooks. If there is no backward among the actions, the
        forwards run without a graph.
        """
        training = any(action.kind == "B" for action in actions)
        links = _Links(self.pipeline, self.mesh, self.wire)
        loss_sum = torch.zeros((), dtype=_loss_dtype(self.wire.dtype), device=self.wire.device)
        # Backward starts from the node that made an output, so the output itself may go once it is sent.
        live: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        for index, action in enumerate(actions):
            if enter is not None:
                enter(action)
            for upcoming in actions[index : index + 2]:
                links.post_receive(upcoming)
            received = links.receive(action)
            self.mesh.watch.microbatch = action.microbatch
            key = (action.microbatch, action.chunk)
            if action.kind == "F":
                if received is not None and training:
                    received.requires_grad_()
                with torch.set_grad_enabled(training):
                    output = chunks[action.chunk](received, action.microbatch)
                if training:
                    live[key] = (received, get_gradient_edge(output))
                if self.pipeline.virtual_stage(self.stage, action.chunk) == self.pipeline.last_virtual_stage:
                    loss_sum += output.detach()
                else:
                    links.send(action, output.detach())
                del output
            else:
                entered, root = live.pop(key)
                # For a loss nothing was received, and autograd starts from a gradient of 1.
                torch.autograd.backward(root, received)
                if entered is not None:
                    assert entered.grad is not None
                    links.send(action, entered.grad)
        links.finish()
        return loss_sum


class _Links:
    """The messages of one stage in one step."""

    def __init__(self, pipeline: Pipeline, mesh: Mesh, wire: Wire) -> None:
        self.pipeline, self.mesh, self.wire = pipeline, mesh, wire
        self.stage = mesh.at.pp
        self.receives: dict[Action, tuple[Tensor, Work]] = {}
        # The tensor is kept with its work, because its memory must not be freed before the message is sent.
        self.sends: dict[tuple[int, ProcessGroup], tuple[Tensor, Work]] = {}

    def post_receive(self, action: Action) -> None:
        source = self.pipeline.source(self.stage, action)
        if source is None or action in self.receives:
            return
        peer, at = source
        buffer = torch.empty(self.wire.shape, dtype=self.wire.dtype, device=self.wire.device)
        self.receives[action] = (buffer, receive(buffer, self._group(action, at), peer))

    def receive(self, action: Action) -> Tensor | None:
        """The input of an action; None for the first forward and the last stage's backward, which receive none."""
        if action not in self.receives:
            return None
        buffer, work = self.receives.pop(action)
        work.wait()
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        target = self.pipeline.target(self.stage, action)
        assert target is not None
        peer, at = target
        group = self._group(action, at)
        self._finish_send((peer, group))
        tensor = tensor.contiguous()
        self.sends[peer, group] = (tensor, send(tensor, group, peer))

    def finish(self) -> None:
        for link in list(self.sends):
            self._finish_send(link)

    def _finish_send(self, link: tuple[int, ProcessGroup]) -> None:
        if link in self.sends:
            _, work = self.sends.pop(link)
            work.wait()

    def _group(self, action: Action, neighbour: Action) -> ProcessGroup:
        wraps = action.chunk != neighbour.chunk
        if action.kind == "F":
            group = self.mesh.pp_wrap_forward if wraps else self.mesh.pp_forward
        else:
            group = self.mesh.pp_wrap_backward if wraps else self.mesh.pp_backward
        assert group is not None, "a message between stages needs a pipeline group"
        return group


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
