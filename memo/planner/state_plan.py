"""The states that stream, as data: the slots of each layer's weights and gradients, and when they are fetched.

The plan is made from the layer operations of one pipeline stage in schedule order. Weights are only read, so a slot
that is given to another layer loses nothing: the next layer is always fetched while one runs, in the place of the layer
that is needed last (Belady, 1966). One stage, three layers whose weights stream, two slots:

    compute   F0        F1        F2        B2        B1        B0
    slot 0    0         0 -> 2    2         2 -> ...
    slot 1    1 fetched 1         1         1         1 -> 0    0

A layer's gradient has a slot while its backward runs. After the last microbatch it is reduced and leaves the slot.
Between microbatches it goes to host memory and comes back, unless no other layer takes its slot meanwhile.
`memo.executor.states` obeys the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memo.spec.layer_ops import LayerOp
from memo.spec.placement import NUM_STATE_SLOTS, LayerPlaces, StatePlacement, next_in_slots

Start = Literal["zero", "fetched", "kept"]
End = Literal["keep", "offload", "reduce"]


class Fetch(NamedTuple):
    """A copy into a slot: of a layer's weights, or of the sum of its gradients so far."""

    kind: Literal["weights", "gradient"]
    layer: int
    slot: int


class StateStep(NamedTuple):
    """One layer operation with the copies around it.

    Attributes:
        fetches: issued when the step begins, for itself (then the copy cannot overlap) or for later steps.
        weight_slot, gradient_slot: the slots of this layer; None if it needs none.
        start: the content of the gradient slot when a backward begins.
        end: what happens to the gradient after a backward, if it is reduced layer by layer; else None.
        is_first, is_last: whether this backward is the first or the last of its layer in the step.
    """

    op: LayerOp
    fetches: tuple[Fetch, ...] = ()
    weight_slot: int | None = None
    gradient_slot: int | None = None
    start: Start | None = None
    end: End | None = None
    is_first: bool = False
    is_last: bool = False

    @property
    def adds_up(self) -> bool:
        """Whether gradients of earlier microbatches were reduced already, so that this reduced gradient is added to
        theirs."""
        return self.end == "reduce" and self.start == "zero" and not self.is_first


@dataclass(frozen=True)
class StatePlan:
    """All steps of one training step on one stage, in order."""

    steps: tuple[StateStep, ...]
    num_weight_slots: int
    num_gradient_slots: int

    @property
    def num_fetches(self) -> int:
        return sum(len(step.fetches) for step in self.steps)


def state_plan(
    ops: Sequence[LayerOp],
    places: Mapping[int, LayerPlaces],
    *,
    reduces_each: bool = False,
    slots: int = NUM_STATE_SLOTS,
) -> StatePlan:
    """Plan one training step.

    Args:
        places: the places of every layer in `ops`, by its global index.
        reduces_each: whether gradients are reduced in every microbatch, as ZeRO-2 does.
        slots: the largest number of slots of each kind.
    """
    weight_slots, weight_fetches = _weights(ops, places, slots)
    backwards, gradient_fetches = _gradients(ops, places, slots, reduces_each)
    steps = []
    for index, op in enumerate(ops):
        fetches = weight_fetches.get(index, ()) + gradient_fetches.get(index, ())
        step = backwards.get(index, StateStep(op))
        steps.append(step._replace(fetches=fetches, weight_slot=weight_slots.get(index)))
    used_weights = 1 + max(weight_slots.values(), default=-1)
    used_gradients = 1 + max((s.gradient_slot for s in steps if s.gradient_slot is not None), default=-1)
    return StatePlan(tuple(steps), used_weights, used_gradients)


def placed_state_plan(ops: Sequence[LayerOp], placement: StatePlacement) -> StatePlan:
    """Plan one training step of a rank whose layers, in the order of their indices, have the places of `placement`."""
    order = sorted({op.layer for op in ops})
    places = {layer: placement.of_layer(position) for position, layer in enumerate(order)}
    return state_plan(ops, places, reduces_each=placement.shards_gradients)


def _weights(
    ops: Sequence[LayerOp], places: Mapping[int, LayerPlaces], slots: int
) -> tuple[dict[int, int], dict[int, tuple[Fetch, ...]]]:
    """The weight slot of each step, and the fetches that each step issues when it begins."""
    needed = [op.layer if places[op.layer].weights_in_slot else None for op in ops]
    slots = min(slots, len({*needed} - {None}))
    content: list[int | None] = [None] * slots
    chosen: dict[int, int] = {}
    fetches: dict[int, tuple[Fetch, ...]] = {}
    for index, (own, wanted) in enumerate(zip(needed, next_in_slots(needed, slots), strict=True)):
        issued = []
        for layer in wanted:
            if layer not in content:
                # There is one whose layer is not wanted, as no more layers are wanted than there are slots.
                slot = next(slot for slot, held in enumerate(content) if held not in wanted)
                content[slot] = layer
                issued.append(Fetch("weights", layer, slot))
        if issued:
            fetches[index] = tuple(issued)
        if own is not None:
            chosen[index] = content.index(own)
    return chosen, fetches


def _gradients(
    ops: Sequence[LayerOp], places: Mapping[int, LayerPlaces], slots: int, reduces_each: bool
) -> tuple[dict[int, StateStep], dict[int, tuple[Fetch]]]:
    """The steps of driven backwards, without weights and fetches; and the fetches of gradients, by the step that issues
    them when it begins."""
    backwards = [index for index, op in enumerate(ops) if op.kind == "B" and places[op.layer].is_driven]
    last_of = {ops[index].layer: index for index in backwards}
    first_of = {ops[index].layer: index for index in reversed(backwards)}
    found: dict[int, StateStep] = {}
    fetches: dict[int, tuple[Fetch]] = {}
    before: dict[int, int] = {}  # layer -> its previous backward
    # The last user of each slot. A backward takes the least recently used slot, as its copy has had most time to end.
    users = [-1] * min(slots, len({layer for layer in last_of if places[layer].gradients_in_slot}))
    for index in backwards:
        layer = ops[index].layer
        is_first, is_last, in_slot = index == first_of[layer], index == last_of[layer], places[layer].gradients_in_slot
        end: End = "reduce" if is_last or (reduces_each and in_slot) else "keep"
        found[index] = StateStep(ops[index], end=end, is_first=is_first, is_last=is_last)
        if not in_slot:
            continue
        slot = users.index(min(users))
        start: Start = "zero"
        if not is_first and not reduces_each:
            if before[layer] in users:
                slot, start = users.index(before[layer]), "kept"
            else:
                start = "fetched"
                fetches[index if len(users) == 1 else max(users)] = (Fetch("gradient", layer, slot),)
                found[before[layer]] = found[before[layer]]._replace(end="offload")
        found[index] = found[index]._replace(gradient_slot=slot, start=start)
        users[slot] = before[layer] = index
    return found, fetches
