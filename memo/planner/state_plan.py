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
from functools import cached_property
from itertools import chain, takewhile
from typing import Literal, NamedTuple

from memo.spec.layer_ops import LayerOp
from memo.spec.placement import NUM_STATE_SLOTS, LayerPlaces, StatePlacement, next_in_slots

Start = Literal["zero", "fetched", "kept"]
End = Literal["keep", "offload", "reduce"]
_Backward = tuple[int | None, Start | None, End | None, bool, bool]
"""The last five fields of a `StateStep`."""
_NO_BACKWARD: _Backward = None, None, None, False, False


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

    @cached_property
    def by_first_need(self) -> tuple[int, ...]:
        """All layers, in the order in which a step first needs their weights, to run or to be fetched."""
        forwards = takewhile(lambda step: step.op.kind == "F", self.steps)  # all layers run before the first backward
        needed = ((step.op.layer, *(fetch.layer for fetch in step.fetches)) for step in forwards)
        return tuple(dict.fromkeys(chain.from_iterable(needed)))


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
    weight_slots, fetches = _weights(ops, places, slots)
    backwards, gradient_fetches = _gradients(ops, places, slots, reduces_each)
    for index, fetch in gradient_fetches.items():
        fetches[index] = (*fetches.get(index, ()), fetch)
    steps = tuple(
        StateStep(op, fetches.get(index, ()), weight_slots.get(index), *backwards.get(index, _NO_BACKWARD))
        for index, op in enumerate(ops)
    )
    gradient_slots = {slot for slot, *_ in backwards.values()} - {None}
    return StatePlan(steps, len({*weight_slots.values()}), len(gradient_slots))


def placed_state_plan(ops: Sequence[LayerOp], placement: StatePlacement) -> StatePlan:
    """Plan one training step of a rank whose layers, in the order of their indices, have the places of `placement`."""
    order = sorted({op.layer for op in ops})
    places = {layer: placement.of_layer(position) for position, layer in enumerate(order)}
    return state_plan(ops, places, reduces_each=placement.shards_gradients)


def _weights(
    ops: Sequence[LayerOp], places: Mapping[int, LayerPlaces], slots: int
) -> tuple[dict[int, int], dict[int, tuple[Fetch, ...]]]:
    """The weight slot of each step, and the fetches that each step issues when it begins."""
    in_slots = {layer for layer, at in places.items() if at.weights_in_slot}
    needed = [op.layer if op.layer in in_slots else None for op in ops]
    slots = min(slots, len({*needed} - {None}))
    content: list[int | None] = [None] * slots
    chosen: dict[int, int] = {}
    fetches: dict[int, tuple[Fetch, ...]] = {}
    for index, (own, wanted) in enumerate(zip(needed, next_in_slots(needed, slots), strict=True)):
        for layer in wanted:
            if layer not in content:
                # There is one whose layer is not wanted, as no more layers are wanted than there are slots.
                slot = [held in wanted for held in content].index(False)
                content[slot] = layer
                fetches[index] = (*fetches.get(index, ()), Fetch("weights", layer, slot))
        if own is not None:
            chosen[index] = content.index(own)
    return chosen, fetches


def _gradients(
    ops: Sequence[LayerOp], places: Mapping[int, LayerPlaces], slots: int, reduces_each: bool
) -> tuple[dict[int, _Backward], dict[int, Fetch]]:
    """The driven backwards by index; and the fetches of gradients, by the step that issues them when it begins."""
    driven = {layer for layer, at in places.items() if at.is_driven}
    in_slots = {layer for layer in driven if places[layer].gradients_in_slot}
    backwards = [(index, op.layer) for index, op in enumerate(ops) if op.kind == "B" and op.layer in driven]
    last_of = {layer: index for index, layer in backwards}
    first_of = {layer: index for index, layer in reversed(backwards)}
    found: dict[int, _Backward] = {}
    fetches: dict[int, Fetch] = {}
    before: dict[int, int] = {}  # layer -> its previous backward
    # The last user of each slot. A backward takes the least recently used slot, as its copy has had most time to end.
    users = [-1] * min(slots, len(in_slots & last_of.keys()))
    for index, layer in backwards:
        is_first, is_last, in_slot = index == first_of[layer], index == last_of[layer], layer in in_slots
        end: End = "reduce" if is_last or (reduces_each and in_slot) else "keep"
        slot: int | None = None
        start: Start | None = None
        if in_slot:
            slot, start = users.index(min(users)), "zero"
            if not is_first and not reduces_each:
                if before[layer] in users:
                    slot, start = users.index(before[layer]), "kept"
                else:
                    start = "fetched"
                    fetches[index if len(users) == 1 else max(users)] = Fetch("gradient", layer, slot)
                    found[before[layer]] = (*found[before[layer]][:2], "offload", *found[before[layer]][3:])
            users[slot] = before[layer] = index
        found[index] = slot, start, end, is_first, is_last
    return found, fetches
