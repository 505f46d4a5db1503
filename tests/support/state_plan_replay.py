"""Replays a state plan and names what is wrong with it; shares no code with the planner."""

import itertools
from collections.abc import Mapping, Sequence

from memo.planner.state_plan import Fetch, StatePlan, StateStep
from memo.spec.layer_ops import LayerOp
from memo.spec.placement import LayerPlaces


class WrongPlan(AssertionError):
    """Names the step and what is wrong there."""


class Replay:
    """Follows the contents of every slot, and of every record of a partial sum, through one training step.

    Args:
        slots: number of slots of each kind that the plan may use.
        reduces_each: whether gradients are reduced in every microbatch.
    """

    def __init__(
        self, plan: StatePlan, ops: Sequence[LayerOp], places: Mapping[int, LayerPlaces], slots: int, reduces_each: bool
    ) -> None:
        self.plan, self.ops, self.places, self.slots, self.reduces_each = plan, list(ops), places, slots, reduces_each
        self.index = 0
        self.weights: list[int | None] = [None] * plan.num_weight_slots
        self.sums: list[tuple[int, frozenset[int]] | None] = [None] * plan.num_gradient_slots  # layer, microbatches
        self.users: list[int | None] = [None] * plan.num_gradient_slots  # step of the last backward
        self.records: dict[int, frozenset[int]] = {}
        self.reduced: dict[int, frozenset[int]] = {}
        self.weight_fetches = 0
        self.gradient_fetches = 0

    def run(self) -> "Replay":
        """Replay the plan, and return this object with the number of fetches. Raises WrongPlan."""
        self._check([step.op for step in self.plan.steps] == self.ops, "the operations are others")
        self._check_counts()
        for index, step in enumerate(self.plan.steps):
            self.index = index
            for fetch in step.fetches:
                (self._fetch_weights if fetch.kind == "weights" else self._fetch_sum)(step, fetch)
            self._use_weights(step)
            self._use_gradient(step)
        for layer, place in self.places.items():
            wanted = frozenset(op.microbatch for op in self.ops if (op.kind, op.layer) == ("B", layer))
            if wanted and (place.optimizer_on_host or place.gradients_in_slot):
                self._check(self.reduced.get(layer) == wanted, f"of layer {layer} not all microbatches were reduced")
        return self

    def _check_counts(self) -> None:
        for name, number in (("weights", self.plan.num_weight_slots), ("gradients", self.plan.num_gradient_slots)):
            layers = {op.layer for op in self.ops if getattr(self.places[op.layer], f"{name}_in_slot")}
            if name == "gradients":
                layers &= {op.layer for op in self.ops if op.kind == "B"}
            self._check(number == min(self.slots, len(layers)), f"{number} slots for {len(layers)} layers' {name}")

    # Weights.

    def _fetch_weights(self, step: StateStep, fetch: Fetch) -> None:
        self.weight_fetches += 1
        self._check(fetch.layer not in self.weights, f"{fetch} lies in a slot already")
        before = list(self.weights)
        self._check(self._next_use(fetch.layer, self.index) is not None, f"{fetch} is not needed any more")
        self.weights[fetch.slot] = fetch.layer
        if step.op.layer in before and self.places[step.op.layer].weights_in_slot:
            self._check(before[fetch.slot] != step.op.layer, f"{fetch} overwrites what this step needs")
        self._check_was_early(fetch)

    def _check_was_early(self, fetch: Fetch) -> None:
        """Check that one step earlier every slot held data that is needed before the data of this fetch."""
        if self.index == 0:
            return
        use = self._next_use(fetch.layer, self.index)
        assert use is not None
        between = {op.layer for op in self.ops[self.index - 1 : use]}
        kept = self.weights_before
        self._check(all(layer in between for layer in kept), f"{fetch} could have been issued a step before")

    def _use_weights(self, step: StateStep) -> None:
        needs = self.places[step.op.layer].weights_in_slot
        self._check(needs == (step.weight_slot is not None), "it has a slot for weights and needs none, or none")
        if step.weight_slot is not None:
            self._check(self.weights[step.weight_slot] == step.op.layer, "its weights are not in its slot")
        self.weights_before = list(self.weights)

    def _next_use(self, layer: int, start: int) -> int | None:
        return next((i for i in range(start, len(self.ops)) if self.ops[i].layer == layer), None)

    # Gradients.

    def _fetch_sum(self, step: StateStep, fetch: Fetch) -> None:
        self.gradient_fetches += 1
        self._check(fetch.layer in self.records, f"{fetch}: its sum has not gone to host memory")
        held = self.sums[fetch.slot]
        self._check(held is None, f"{fetch} overwrites the sum of layer {held and held[0]}")
        self._check(step.gradient_slot != fetch.slot or step.op.layer == fetch.layer, f"{fetch}: the slot is in use")
        user = next(i for i in range(self.index, len(self.ops)) if self.plan.steps[i].gradient_slot == fetch.slot)
        self._check(self.plan.steps[user].op.layer == fetch.layer, f"{fetch}: another layer uses the slot first")
        others = [i for i in range(user) if self.plan.steps[i].gradient_slot is not None]
        last_other = max(others)
        can_overlap = self.plan.steps[last_other].gradient_slot != fetch.slot
        self._check(self.index == (last_other if can_overlap else user), f"{fetch} is not issued as early as it can be")
        self.sums[fetch.slot] = (fetch.layer, self.records.pop(fetch.layer))

    def _use_gradient(self, step: StateStep) -> None:
        op, place = step.op, self.places[step.op.layer]
        if op.kind == "F" or not (place.optimizer_on_host or place.gradients_in_slot):
            given = (step.gradient_slot, step.start, step.end, step.is_first, step.is_last)
            self._check(given == (None, None, None, False, False), f"{given}, but it has no driven gradient")
            return
        same = [i for i, other in enumerate(self.ops) if (other.kind, other.layer) == ("B", op.layer)]
        self._check(step.is_first == (self.index == same[0]), "is_first is wrong")
        self._check(step.is_last == (self.index == same[-1]), "is_last is wrong")
        if not place.gradients_in_slot:
            self._check((step.gradient_slot, step.start) == (None, None), "its gradient is resident")
            self._check(step.end == ("reduce" if step.is_last else "keep"), f"a resident gradient ends in {step.end}")
            self._add(op, resident=True, reduces=step.is_last)
            return
        self._check(step.gradient_slot is not None, "its gradient needs a slot")
        self._enter(step)
        self._leave(step)

    def _enter(self, step: StateStep) -> None:
        slot, layer = step.gradient_slot, step.op.layer
        assert slot is not None
        held = self.sums[slot]
        if step.start == "zero":
            self._check(step.is_first or self.reduces_each, "zeroes a sum that goes on")
            self._check(held is None, f"zeroes the sum of layer {held and held[0]}")
            self.sums[slot] = (layer, frozenset())
        else:
            self._check(held is not None and held[0] == layer, "the sum in its slot is another layer's")
            user = self.users[slot]
            assert user is not None
            since = [i for i in range(user, self.index) if self.plan.steps[i].gradient_slot == slot]
            foreign = any(self.ops[i].layer != layer for i in since)
            self._check(step.start == ("fetched" if foreign else "kept"), f"{step.start}, but who used the slot since?")
        self.users[slot] = self.index

    def _leave(self, step: StateStep) -> None:
        slot, op = step.gradient_slot, step.op
        assert slot is not None
        held = self.sums[slot]
        assert held is not None
        total = held[1] | {op.microbatch}
        self._check(op.microbatch not in held[1], "a microbatch is added twice")
        self.sums[slot] = (op.layer, total)
        self._check((step.end == "reduce") == (step.is_last or self.reduces_each), f"ends in {step.end}")
        if step.end == "reduce":
            self.sums[slot] = None
            self._check(not self.reduced.get(op.layer, frozenset()) & total, "a microbatch is reduced twice")
            self.reduced[op.layer] = self.reduced.get(op.layer, frozenset()) | total
        elif step.end == "offload":
            self.sums[slot] = None
            self.records[op.layer] = total
        else:
            self._check(step.end == "keep", f"ends in {step.end}")

    def _add(self, op: LayerOp, resident: bool, reduces: bool) -> None:
        assert resident
        total = self.records.get(op.layer, frozenset()) | {op.microbatch}
        self.records[op.layer] = total
        if reduces:
            self.reduced[op.layer] = self.records.pop(op.layer)

    def _check(self, right: bool, message: str) -> None:
        if not right:
            step = self.plan.steps[self.index] if self.index < len(self.plan.steps) else None
            raise WrongPlan(f"step {self.index} ({None if step is None else step.op}): {message}")


def fewest_fetches(layers: Sequence[int], slots: int) -> int:
    """Return the least number of fetches without a late one, over all choices of the slot that each fetch overwrites.

    While a layer runs, the fetch of the next different layer must be under way if there is a slot for it.
    """
    ways: dict[frozenset[int], int] = {frozenset(): 0}
    for index, layer in enumerate(layers):
        others = [other for other in layers[index:] if other != layer]
        wanted = frozenset([layer, *others[:1]][:slots])
        following: dict[frozenset[int], int] = {}
        for held, fetches in ways.items():
            cost = fetches + len(wanted - held)
            rest = held - wanted
            for kept in itertools.combinations(rest, min(len(rest), slots - len(wanted))):
                choice = wanted.union(kept)
                following[choice] = min(cost, following.get(choice, cost))
        ways = following
    return min(ways.values())
