"""One training step of one rank, action by action: the tensors between layers, and the peak.

Lifespans follow memo.parallel.pipeline and memo.parallel.stage_messages: a variable keeps its tensor until it is
assigned again, a message keeps its tensor until the next message on the same link, and a microbatch in flight keeps the
input of its chunk. Stages that meet for their messages keep them in buffers that last for the run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memo.estimate.program.course import Course
from memo.estimate.program.gathers import Gathers
from memo.estimate.program.ledger import Block, Ledger, Pass
from memo.estimate.program.passes import EndPasses, LayerPasses
from memo.estimate.program.reductions import Gradients, Reductions
from memo.spec.schedule import Action, Pipeline, one_f_one_b


@dataclass
class _Flight:
    """One microbatch in one chunk, between forward and backward."""

    entered: Block | None
    rope: Block | None
    layers: list[tuple[int, list[Block]]]  # (number of layers, kept blocks) of each group, first layer first
    hidden: Block | None = None  # before the loss, whose backward overwrites them


class Step:
    """A walk through a step that records its requests in `ledger`, without states and rounding buffers."""

    def __init__(
        self,
        ledger: Ledger,
        course: Course,
        kinds: Sequence[LayerPasses],
        ends: EndPasses,
        gradients: Gradients,
        gathered: Mapping[int, int],
    ) -> None:
        """`kinds`: the passes of each kind of layers; `gathered`: the `sizes` of `Gathers`."""
        self.ledger, self.course, self.kinds, self.ends = ledger, course, kinds, ends
        self.layers = course.layers
        self.passes: LayerPasses = kinds[course.kinds[0]]  # for facts that all kinds share
        self._holders: Counter[Block] = Counter()
        self._names: dict[str, Block | None] = {}  # variables and links of memo.parallel.pipeline
        self._posted: dict[Action, Block] = {}
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._gathered = gathered
        self._reductions = Reductions(ledger, course, gradients)
        # Layers of one kind are alike, with two exceptions: some may also request gloo's copies of their states, and
        # some may have their states in other places, which matters when the last gradients are reduced.
        places = {*map(course.placement.of_layer, range(len(course.kinds)))} if course.placement.streams else set()
        self._alike = len({*course.kinds}) == 1 and (course.on_cuda or not any(place.in_slot for place in places))
        self._alike_at_last = self._alike and len(places) < 2

    def _of(self, owner: int) -> LayerPasses:
        """Return the passes of a layer, by its number among the modules of the stage."""
        return self.kinds[self.course.kind_of(owner)]

    def run(self) -> Ledger:
        if self.course.breadth_first:
            self._run_breadth_first()
        else:
            self._run_schedule()
        self._reductions.finish()
        return self.ledger

    def _run_schedule(self) -> None:
        course, count = self.course, self.course.microbatches
        actions = one_f_one_b(Pipeline(course.pp, course.vpp, count), course.stage)
        self._gathers = Gathers(
            self.ledger, self._gathered, (owner for action in actions for owner in self._owners(action))
        )
        for index, action in enumerate(actions):
            for upcoming in actions[index : index + 2]:
                self._post_receive(upcoming)
            received = self._posted.pop(action, None)
            self._name("received", received)
            self._drop(received)  # the message no longer keeps its tensor
            is_last_microbatch = action.microbatch == count - 1
            if action.kind == "F":
                self._forward(action, received, self._groups(is_last_microbatch))
            else:
                self._backward(action, received, is_last_microbatch=is_last_microbatch)
        for name in list(self._names):
            self._name(name, None)

    def _run_breadth_first(self) -> None:
        """Run all microbatches through one module before the next (memo.train.breadth_first).

        Microbatches are alike, so the peak is in the forward of the last microbatch, in the backward of the first one,
        or where the gradients of the last one are reduced. All microbatches between are walked through at once.
        """
        ledger, groups = self.ledger, self._alike_microbatches()
        owners = range(1, self.layers + 1)
        self._gathers = Gathers(ledger, self._gathered, [*owners, *reversed(owners)])
        ropes = []
        for count in groups:
            self._play(self.ends.rope, "embedding forward")
            ropes.append(ledger.make("rope table", count * self.ends.rope_bytes))
        hidden = []
        for count in groups:
            self._play(self.ends.embedding, "embedding forward")
            hidden.append(ledger.make("input", count * self.passes.hidden_bytes))
        kept: list[list[Block]] = []
        for owner in owners:
            self._gathers.begin(owner)
            self._reductions.before_first_forward(owner)
            for index, count in enumerate(groups):
                hidden[index] = self._layer_forward(owner, hidden[index], count, kept)
        grads = []
        for index, count in enumerate(groups):
            grads.append(hidden[index])
            if count == 1:
                self._loss_backward()
            self._reduce(self.layers + 1, index == len(groups) - 1, self.ends.loss_backward)
        for owner in reversed(owners):
            self._gathers.begin(owner)
            for index in range(len(groups)):
                is_last = index == len(groups) - 1
                self._reductions.before_backward(owner)
                self._play(self._of(owner).backward, "layer backward")
                ledger.free(*kept[(owner - 1) * len(groups) + index])
                self._reduce(owner, is_last, self._of(owner).backward)
        for index, grad in enumerate(grads):
            self._embedding_backward(grad, None)
            self._reductions.after_backward(0, index == len(groups) - 1)
        ledger.free(*ropes)

    def _alike_microbatches(self) -> list[int]:
        """Return groups of microbatches to walk through at once, as their sizes."""
        between = self.course.microbatches - 2
        return [1, between, 1] if between > 0 else [1] * self.course.microbatches

    def _layer_forward(self, owner: int, x: Block, count: int, kept: list[list[Block]]) -> Block:
        """Return the output for `count` microbatches; x is freed, or joins the blocks that `kept` receives."""
        self._play(self._of(owner).forward, "layer forward")
        self.ledger.at = "layer forward"
        keeps_input = self.passes.keeps_input
        # With several microbatches, the input of each is freed before the output of the next one is made.
        takes_its_place = self.passes.in_place or (count > 1 and not keeps_input)
        output = x if takes_its_place else self.ledger.make("input", count * self.passes.hidden_bytes)
        kept.append([self._keep(owner, count)])
        if keeps_input:
            kept[-1].append(x)
        elif output is not x:
            self.ledger.free(x)
        self._reductions.after_forward()
        return output

    def _owners(self, action: Action) -> Sequence[int]:
        """Return the layers of an action's chunk, in the order in which they run."""
        first = action.chunk * (self.layers + 2) + 1
        owners = range(first, first + self.layers)
        return owners if action.kind == "F" else owners[::-1]

    # Passes.

    def _groups(self, is_last_microbatch: bool) -> list[int]:
        """Return groups of a chunk's layers to walk through at once, as their sizes, from the first layer on.

        Kept tensors add up in forward and are freed in backward, so the chunk has its peak at one of its last two
        layers. Reduced gradients add up in the backward of the last microbatch, so its peak may be at the first layer.
        All layers between are one group, unless their requests differ.
        """
        first = [1] if is_last_microbatch else []
        between = self.layers - len(first) - 2
        is_alike = self._alike_at_last if is_last_microbatch else self._alike
        return [*first, between, 1, 1] if is_alike and between > 0 else [1] * self.layers

    def _forward(self, action: Action, received: Block | None, groups: list[int]) -> None:
        ledger, hidden_bytes = self.ledger, self.passes.hidden_bytes
        x = received if received is not None else self._embed()
        flight = _Flight(received, self._rope_table(), [])
        self._hold(received)
        owner = action.chunk * (self.layers + 2) + 1
        for count in groups:
            self._gathers.begin(owner)
            if action.microbatch == 0:
                self._reductions.before_first_forward(owner, count)
            self._play(self._of(owner).forward, "layer forward")
            ledger.at = "layer forward"
            output = x if self.passes.in_place else ledger.make("input", hidden_bytes)
            blocks = [self._keep(owner, count, num_inputs=count - 1)]  # x is the input of the first layer
            if x not in (received, output):
                if self.passes.keeps_input:
                    blocks.append(x)
                else:
                    ledger.free(x)
            self._reductions.after_forward()
            flight.layers.append((count, blocks))
            owner += count
            x = output
        self._flights[action.microbatch, action.chunk] = flight
        if self._virtual(action) == self.course.pp * self.course.vpp - 1:
            flight.hidden = x
        else:
            self._send(action, x)  # backward needs the autograd node of x, not its tensor

    def _backward(self, action: Action, received: Block | None, *, is_last_microbatch: bool) -> None:
        ledger = self.ledger
        flight = self._flights.pop((action.microbatch, action.chunk))
        self._name("entered", flight.entered)
        self._name("gradient of entered", None)
        self._drop(flight.entered)
        grad, of_head = received, None
        if flight.hidden is not None:
            grad, of_head = flight.hidden, self._loss_backward()
        owner = action.chunk * (self.layers + 2) + self.layers + 1
        self._reduce(owner, is_last_microbatch, self.ends.loss_backward)
        for count, blocks in reversed(flight.layers):
            self._gathers.begin(owner - 1)
            self._reductions.before_backward(owner - 1)
            backward = self._of(owner - 1).backward
            self._play(backward, "layer backward")
            ledger.at = "layer backward"
            ledger.free(*blocks)
            if grad is received and not self.passes.in_place:
                grad = ledger.make("gradient", self.passes.hidden_bytes)
            owner -= count
            self._reduce(owner, is_last_microbatch, backward)
        ledger.free(flight.rope)
        assert grad is not None
        if flight.entered is not None and grad is received:  # autograd copies a gradient that its caller still holds
            grad = ledger.make("gradient", self.passes.hidden_bytes)
        if flight.entered is None:
            self._embedding_backward(grad, of_head)
            self._reductions.after_backward(0, is_last_microbatch)
        else:
            self._name("gradient of entered", grad)
            self._send(action, grad)

    def _rope_table(self) -> Block | None:
        self._play(self.ends.rope, "embedding forward")
        return self.ledger.make("rope table", self.ends.rope_bytes) if self.ends.rope_bytes else None

    def _embed(self) -> Block:
        self._play(self.ends.embedding, "embedding forward")
        return self.ledger.make("input", self.passes.hidden_bytes)

    def _loss_backward(self) -> Block | None:
        """Return the head's gradient if a tied embedding adds its gradient to it, else None."""
        self._play(self.ends.loss_backward, "loss backward")
        return self.ledger.make("head gradient", self.ends.of_head_bytes) if self.ends.of_head_bytes else None

    def _embedding_backward(self, grad: Block, of_head: Block | None) -> None:
        """Run the embedding's backward and free both gradients, except a received one."""
        is_held = self._holders[grad] > 0
        backward = self.ends.held_embedding_backward if is_held else self.ends.embedding_backward
        self._play(backward, "embedding backward")
        self.ledger.free(None if is_held else grad, of_head)

    def _keep(self, owner: int, count: int, num_inputs: int = 0) -> Block:
        """Return the tensors that `count` layers like this one keep between forward and backward.

        `count` may also be microbatches of this layer; `num_inputs` inputs are added if inputs stay.
        """
        passes = self._of(owner)
        of_inputs = num_inputs * passes.hidden_bytes if passes.keeps_input else 0

        def parts() -> dict[str, int]:
            kept = {name: count * num_bytes for name, num_bytes in passes.kept.items()}
            return kept | {"input": of_inputs} if of_inputs else kept

        return self.ledger.make_all(count * passes.kept_bytes + of_inputs, parts)

    def _play(self, recorded: Pass, at: str) -> None:
        """Add the worst moment of a pass; the tensors of its start are in the ledger already."""
        self.ledger.reach(recorded.transient_bytes, lambda: recorded.transient, at)

    def _reduce(self, owner: int, is_last_microbatch: bool, backward: Pass) -> None:
        """Start the reductions that follow a module's backward; they overlap with the tail of that backward."""
        if self._reductions.after_backward(owner, is_last_microbatch):
            self.ledger.reach(backward.late_bytes, lambda: backward.late)

    # Messages, and the holders that keep a tensor alive.

    def _virtual(self, action: Action) -> int:
        return action.chunk * self.course.pp + self.course.stage

    def _post_receive(self, action: Action) -> None:
        virtual = self._virtual(action)
        ends = 0 if action.kind == "F" else self.course.pp * self.course.vpp - 1
        if virtual == ends or action in self._posted or self.course.pp == 1:
            return
        block = self.ledger.make("received", self.passes.hidden_bytes)
        self._hold(block)
        self._posted[action] = block

    def _send(self, action: Action, block: Block) -> None:
        """Keep `block` on its link until the next message there.

        There are four links: forward and backward, each to the neighbour or between the last stage and the first.
        """
        step = 1 if action.kind == "F" else -1
        target = self._virtual(action) + step
        self._name(f"sent {action.kind} {target // self.course.pp != action.chunk}", block)

    def _name(self, name: str, block: Block | None) -> None:
        self._hold(block)
        self._drop(self._names.get(name))
        self._names[name] = block

    def _hold(self, block: Block | None) -> None:
        if block is not None:
            self._holders[block] += 1

    def _drop(self, block: Block | None) -> None:
        if block is not None:
            self._holders[block] -= 1
            if not self._holders[block]:
                self.ledger.free(block)
