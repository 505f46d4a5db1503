"""The steps of forward, recomputation and backward of token-wise operations, on one tile of tokens.

Only this file decides which values are recomputed, in which order operations and messages over tp run, and when a value
is freed. Steps are data; a machine runs them.

    forward    operations in their order; a value that is to be kept is copied to the slot once it exists
    backward   first recomputes values that were not kept, and replays; then the backwards in reverse order

Messages of a group run one after another. So a message is issued as soon as its source exists, in the order in which
steps first wait for messages. A value is freed after the last step that uses it. The source of a message is freed after
the first step that waits for the message, and the values that a graph holds after the step that uses up the graph.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from memo.program.operations import Operation

_GATHERED = "gathered "


@dataclass(frozen=True)
class Step:
    """One step of a walk.

    Attributes:
        do: forward, replay (forward under a graph) or backward of `operation`; gather over tp; keep: copy to the slot.
        reads, makes: names of values, or of gradients, graphs and gathered values as the functions below name them.
            A backward reads, in this order: the gradients of the operation's outputs; the same gathered, if it
            scatters; its graph, if it replays; the values that it needs.
        total: the sum just before `operation` that the same kernel computes; None: there is none.
        adds_to: in a backward: the gradient of an input that exists already, to which it adds.
        place: in a backward with `adds_to`: the value from outside of the walk whose gradient the sum is.
        holds: names that must stay alive until the step ends, though the step does not read them.
        frees: names that no later step uses.
    """

    do: Literal["forward", "replay", "backward", "gather", "keep"]
    operation: Operation | None
    reads: tuple[str, ...]
    makes: tuple[str, ...] = ()
    total: Operation | None = None
    adds_to: str = ""
    place: str = ""
    holds: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backward:
    """The steps of a backward, and for each value from outside of the walk the name of its gradient at the end."""

    steps: tuple[Step, ...]
    gradients: dict[str, str]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)


class Machine:
    """Runs steps; a subclass has a method for each value of `Step.do`, called with the step and its operation, if any.

    Attributes:
        live: the existing values by name, in the form that the machine gives them.
    """

    def __init__(self, live: dict[str, Any]) -> None:
        self.live = live

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            given = (step,) if step.operation is None else (step, step.operation)
            getattr(self, step.do)(*given)
            self.free(step.frees)

    def free(self, names: tuple[str, ...]) -> None:
        for name in names:
            del self.live[name]


def gradient(name: str) -> str:
    return f"gradient of {name}"


def graph(name: str) -> str:
    return f"graph of {name}"


def gathered(name: str) -> str:
    return _GATHERED + name


@lru_cache(maxsize=4096)
def forward(
    operations: tuple[Operation, ...], targets: frozenset[str], kept: frozenset[str], again: bool = False
) -> tuple[Step, ...]:
    """Return the steps that make `targets` from values outside of `operations`; `kept` values go to the slot.

    `again`: whether this is a recomputation, when the slot holds all recalled values, and all kept values but targets.
    """
    steps = []
    for operation, total in _with_sums(_needed(operations, targets, kept if again else ())):
        step = _forward(operation, total, again)
        copied = [name for name in step.makes if name in kept and not operation.writes_to_slot]
        steps += [step, *(Step("keep", None, (name,)) for name in copied)]
    return _freeing(_with_messages(steps), targets)


def _needed(operations: Sequence[Operation], targets: Collection[str], exist: Collection[str]) -> list[Operation]:
    """The operations that `targets` depend on, in their order, as far as their inputs do not exist."""
    wanted, found = set(targets), []
    for operation in reversed(operations):
        if wanted.intersection(operation.makes):
            found.append(operation)
            wanted.update({*operation.reads, *operation.reads_without_gradient}.difference(exist))
    return found[::-1]


def _with_sums(operations: Sequence[Operation]) -> Iterator[tuple[Operation, Operation | None]]:
    """Yield each operation, with the sum before it if one kernel computes both."""
    for index, operation in enumerate(operations):
        before = operations[index - 1] if index else None
        after = operations[index + 1] if index + 1 < len(operations) else None
        if after is None or not _are_one_kernel(operation, after):
            yield operation, before if before is not None and _are_one_kernel(before, operation) else None


def _are_one_kernel(total: Operation, operation: Operation) -> bool:
    return total.is_sum and operation.takes_sums and total.makes == operation.reads


def _forward(operation: Operation, total: Operation | None = None, again: bool = False) -> Step:
    reads = tuple(map(gathered, operation.reads)) if operation.gathers else operation.reads
    if total is None:
        recalled = operation.recalled if again else ()
        makes = tuple(name for name in operation.makes if name not in recalled)
        return Step("forward", operation, (*reads, *operation.reads_without_gradient, *recalled), makes)
    return Step("forward", operation, total.reads, (*total.makes, *operation.makes), total)


@lru_cache(maxsize=4096)
def backward(operations: tuple[Operation, ...], kept: frozenset[str], incoming: frozenset[str]) -> Backward:
    """Return the steps from the gradients of `incoming` values to those of all values from outside; `kept`: the values
    in the slot.

    If a value from outside is itself in `incoming`, the operations' gradients are added to its gradient.
    """
    again = rebuilt(operations, kept)
    steps = []
    for operation in operations:
        if operation.replays:
            made = [name for name in operation.makes if name not in kept]
            steps.append(Step("replay", operation, operation.reads, (*map(graph, operation.makes), *made)))
        elif operation in again:
            steps.append(_forward(operation, again=True))
    gradients = {name: gradient(name) for name in incoming}
    for operation in reversed(operations):
        given = [gradients[name] for name in operation.makes if name in gradients]
        if operation.is_sum:
            gradients |= dict.fromkeys(operation.reads, given[0])
            continue
        steps.append(_backward(operation, given, gradients))
        gradients |= dict(zip(operation.reads, steps[-1].makes, strict=True))
    inside = {name for operation in operations for name in operation.makes}
    ends = {name: found for name, found in gradients.items() if name not in inside}
    places = {found: name for name, found in ends.items()}
    steps = [replace(step, place=places.get(step.makes[0], "")) if step.adds_to else step for step in steps]
    return Backward(_freeing(_with_messages(steps), ends.values()), ends)


def _backward(operation: Operation, given: Sequence[str], gradients: dict[str, str]) -> Step:
    """`given`: the gradients of the operation's outputs; `gradients`: all existing gradients, by value."""
    reads, holds = [*given], list[str]()
    if operation.scatters:
        reads += map(gathered, given)
    if operation.replays:
        reads += map(graph, operation.makes)
        holds += [*operation.reads, *operation.makes]
    reads += map(gathered, operation.needs) if operation.gathers else operation.needs
    reads += operation.recalled + operation.reads_without_gradient
    exist = [gradients[name] for name in operation.reads if name in gradients]
    makes = (_sum_with(gradients.get(name, ""), gradient(name)) for name in operation.reads)
    adds_to = exist[0] if exist else ""
    return Step("backward", operation, tuple(reads), tuple(makes), adds_to=adds_to, holds=(*holds, *exist))


def _sum_with(exists: str, added: str) -> str:
    """The name of a gradient after an addition to it; through a sum, `exists` may be the gradient of another value."""
    return f"sum with {exists}" if exists.endswith(added) else added


def rebuilt(operations: Sequence[Operation], kept: Collection[str]) -> set[Operation]:
    """Return the operations whose forward runs again in backward, besides those that replay.

    Their outputs were not kept, and a backward or another recomputation needs them.
    """
    maker = {name: operation for operation in operations for name in operation.makes}
    again: set[Operation] = set()

    def want(name: str) -> None:
        operation = maker.get(name)
        if operation is None or name in kept or operation.replays or operation in again or name in operation.recalled:
            return
        again.add(operation)
        for read in operation.reads:
            want(read)

    for operation in operations:
        for name in operation.reads if operation.replays else operation.needs:
            want(name)
    return again


def _with_messages(steps: Sequence[Step]) -> list[Step]:
    made = {name: index for index, step in enumerate(steps) for name in step.makes}
    waited_for = [name for step in steps for name in step.reads if name.startswith(_GATHERED)]
    waiting, found = list(dict.fromkeys(waited_for)), []
    for index, step in enumerate(steps):
        while waiting and made.get(_source(waiting[0]), -1) < index:
            found.append(Step("gather", None, (_source(waiting[0]),), (waiting.pop(0),)))
        found.append(step)
    return found


def _freeing(steps: Sequence[Step], outputs: Collection[str]) -> tuple[Step, ...]:
    last: dict[str, int] = {}
    waited_for: set[str] = set()
    for index, step in enumerate(steps):
        sources = [_source(name) for name in step.reads if name.startswith(_GATHERED) and name not in waited_for]
        waited_for.update(step.reads)
        last |= dict.fromkeys((*step.makes, *step.reads, *step.holds, *sources), index)
    made = [name for step in steps for name in step.makes if name not in outputs]
    freed: list[list[str]] = [[] for _ in steps]
    for name in made:
        freed[last[name]].append(name)
    return tuple(replace(step, frees=tuple(names)) for step, names in zip(steps, freed, strict=True))


def _source(name: str) -> str:
    return name.removeprefix(_GATHERED)
