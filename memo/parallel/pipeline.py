"""Runs a pipeline schedule: forwards, backwards, and the messages between stages (memo.parallel.stage_messages)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memo.mesh import Mesh
from memo.parallel.entrance import Entrance
from memo.parallel.hidden import HiddenInPlan
from memo.parallel.stage_messages import Messages, MessagesInSections, WholeMessages, Wire
from memo.spec.schedule import Action, Pipeline
from memo_kernels import wide_dtype

ChunkForward = Callable[[Tensor | None, int], Tensor]
"""(input [n, b, h] or None at the first virtual stage, microbatch) -> output [n, b, h]. At the last virtual stage it is
the loss, which backward computes (memo.parallel.loss)."""

Enter = Callable[[Action], None]
"""Called with each action before anything is done for it."""


class PipelineStage:
    """One stage of a pipeline: executes its list of actions."""

    def __init__(self, pipeline: Pipeline, mesh: Mesh, wire: Wire, hidden: HiddenInPlan | None = None) -> None:
        """`hidden`: None if hidden states are on the device."""
        self.pipeline, self.mesh, self.wire, self.hidden = pipeline, mesh, wire, hidden
        self.stage = mesh.at.pp

    def run(self, actions: Sequence[Action], chunks: Sequence[ChunkForward], enter: Enter | None = None) -> Tensor:
        """Execute one step; returns the detached sum of this rank's losses (0 on a stage without the head).

        Gradients of parameters are left to autograd and its hooks. If there is no backward among the actions, the
        forwards run without a graph, and there is no sum of losses.
        """
        training = any(action.kind == "B" for action in actions)
        messages = self._messages(actions, training)
        loss_sum = torch.zeros((), dtype=wide_dtype(self.wire.dtype), device=self.wire.device)
        # Backward starts from the node that made an output, so the output itself can be freed once it is sent.
        live: dict[tuple[int, int], tuple[Tensor | Entrance | None, GradientEdge, Tensor | None]] = {}
        for index, action in enumerate(actions):
            if enter is not None:
                enter(action)
            received = messages.receive(index)
            self.mesh.watch.microbatch = action.microbatch
            key = (action.microbatch, action.chunk)
            if action.kind == "F":
                origin: Tensor | Entrance | None = None
                if received is not None and training:
                    received, origin = messages.enter(received)
                with torch.set_grad_enabled(training):
                    output = chunks[action.chunk](received, action.microbatch)
                is_last = self.pipeline.virtual_stage(self.stage, action.chunk) == self.pipeline.last_virtual_stage
                if training:
                    live[key] = (origin, get_gradient_edge(output), output.detach() if is_last else None)
                if not is_last:
                    messages.send(index, output.detach())
                del output, origin
            else:
                entered, root, loss = live.pop(key)
                # The backward of a loss receives nothing; autograd then starts from a gradient of 1.
                torch.autograd.backward(root, received)
                del root  # its graph holds references to the microbatch's context
                if loss is not None:
                    loss_sum += loss
                if entered is not None:
                    assert entered.grad is not None
                    messages.send(index, entered.grad)
        messages.finish()
        return loss_sum

    def _messages(self, actions: Sequence[Action], training: bool) -> Messages:
        if self.hidden is None:
            return WholeMessages(self.pipeline, self.mesh, self.wire, actions)
        hidden = self.hidden if training else self.hidden.unplanned
        if not training:
            hidden.restart()
        return MessagesInSections(self.pipeline, self.mesh, self.wire, hidden, training)
