"""Messages between stages of a pipeline: hidden states [n, b, h] and their gradients, whole, or section by section.

Every message has the same shape, which is known before the step, so no metadata is sent.

Whole messages go from device to device while actions run. At most two receives are posted and one send per link is in
flight, so the buffers of a step do not grow with the number of microbatches; `memo.spec.clock.run` checks that a
schedule does not deadlock under exactly these rules.

If hidden states are in host memory, both stages wait for each other at each message (memo.spec.rendezvous), and a
device never holds a whole message:

    sender      record -> section on the device -> message | next section
    receiver                        message -> section on the device -> record | next section
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from memo.mesh import Mesh
from memo.parallel.collectives import receive, send
from memo.parallel.entrance import Entrance, enter
from memo.parallel.hidden import HiddenInPlan
from memo.spec.rendezvous import Rendezvous, items_in_evaluation, items_in_training
from memo.spec.schedule import Action, Pipeline


@dataclass(frozen=True)
class Wire:
    """Shape, dtype and device of the tensors that stages send to each other."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device


class Messages(Protocol):
    """The messages of one stage in one step; `index` is an action's place in the stage's schedule."""

    def receive(self, index: int) -> Tensor | None:
        """Return the input [n, b, h] of an action, or a stand-in; None if it receives nothing, as the first stage's
        forward and the last stage's backward."""

    def enter(self, received: Tensor) -> tuple[Tensor, Tensor | Entrance]:
        """Begin a forward's graph; returns its input, and an object with the input's gradient as `grad` after the
        backward."""

    def send(self, index: int, tensor: Tensor) -> None:
        """Send the output of an action."""

    def finish(self) -> None:
        """Call after the last action: waits for all messages in flight."""


class WholeMessages:
    """Messages from device to device, while actions run."""

    def __init__(self, pipeline: Pipeline, mesh: Mesh, wire: Wire, actions: Sequence[Action]) -> None:
        self.pipeline, self.mesh, self.wire, self.actions = pipeline, mesh, wire, actions
        self.stage = mesh.at.pp
        self.receives: dict[Action, tuple[Tensor, Work]] = {}
        # The tensor is kept with its work, because its memory must not be freed before the message has been sent.
        self.sends: dict[tuple[int, ProcessGroup], tuple[Tensor, Work]] = {}

    def receive(self, index: int) -> Tensor | None:
        for upcoming in self.actions[index : index + 2]:
            self._post(upcoming)
        action = self.actions[index]
        if action not in self.receives:
            return None
        buffer, work = self.receives.pop(action)
        work.wait()
        return buffer

    def enter(self, received: Tensor) -> tuple[Tensor, Tensor]:
        return received.requires_grad_(), received

    def send(self, index: int, tensor: Tensor) -> None:
        action = self.actions[index]
        target = self.pipeline.target(self.stage, action)
        assert target is not None
        peer, at = target
        group = _group(self.mesh, action, at)
        self._finish_send((peer, group))
        tensor = tensor.contiguous()
        self.sends[peer, group] = (tensor, send(tensor, group, peer))

    def finish(self) -> None:
        for link in list(self.sends):
            self._finish_send(link)

    def _post(self, action: Action) -> None:
        source = self.pipeline.source(self.stage, action)
        if source is None or action in self.receives:
            return
        peer, at = source
        buffer = torch.empty(self.wire.shape, dtype=self.wire.dtype, device=self.wire.device)
        self.receives[action] = (buffer, receive(buffer, _group(self.mesh, action, at), peer))

    def _finish_send(self, link: tuple[int, ProcessGroup]) -> None:
        if link in self.sends:
            _, work = self.sends.pop(link)
            work.wait()


class MessagesInSections:
    """Messages from host records to host records, between actions.

    An action's modules read received hidden states from the records, and leave their output there until it is sent.
    """

    def __init__(self, pipeline: Pipeline, mesh: Mesh, wire: Wire, hidden: HiddenInPlan, training: bool) -> None:
        """`hidden`: hidden states under the plan that the step follows."""
        self.pipeline, self.mesh, self.hidden = pipeline, mesh, hidden
        self.stage = mesh.at.pp
        self.stand_in = hidden.begin(wire.shape, torch.empty(0, dtype=wire.dtype, device=wire.device))
        items = (items_in_training if training else items_in_evaluation)(pipeline)[self.stage]
        self.actions: list[Action] = []
        self.before: list[list[Rendezvous]] = [[]]  # rendezvous before each action, and before the end
        for item in items:
            if isinstance(item, Rendezvous):
                self.before[-1].append(item)
            else:
                self.actions.append(item)
                self.before.append([])

    def receive(self, index: int) -> Tensor | None:
        for rendezvous in self.before[index]:
            self._meet(rendezvous)
        return None if self.pipeline.source(self.stage, self.actions[index]) is None else self.stand_in

    def enter(self, received: Tensor) -> tuple[Tensor, Entrance]:
        entrance = Entrance()
        return enter(received, entrance), entrance

    def send(self, index: int, tensor: Tensor) -> None:
        """Do nothing: the output is in host memory already."""

    def finish(self) -> None:
        for rendezvous in self.before[-1]:
            self._meet(rendezvous)

    def _meet(self, rendezvous: Rendezvous) -> None:
        group = _group(self.mesh, rendezvous.sent, rendezvous.awaited)
        for section in self.hidden.sections:
            if rendezvous.source == self.stage:
                part = self.hidden.take(self.stand_in, section.index)
                send(part, group, rendezvous.target).wait()
            else:
                part = self.hidden.room(self.stand_in, section.index)
                receive(part, group, rendezvous.source).wait()
                self.hidden.put(part, section.index)


def _group(mesh: Mesh, action: Action, neighbour: Action) -> ProcessGroup:
    """The group for messages between two actions of one kind; each link of the ring of stages has one for each kind."""
    wraps = action.chunk != neighbour.chunk
    if action.kind == "F":
        group = mesh.pp_wrap_forward if wraps else mesh.pp_forward
    else:
        group = mesh.pp_wrap_backward if wraps else mesh.pp_backward
    assert group is not None, "a message between stages needs a pipeline group"
    return group
