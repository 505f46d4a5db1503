"""Layouts whose states do not fit on the GPUs as they are: shared out over dp x cp, or streamed from host memory.

Tried in order of what their compute takes at least, and only while that could still win.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from memo.estimate.calibration import FITS_SHARE, USABLE_SHARE
from memo.estimate.host_memory import node_budget_bytes
from memo.search.bounds import Bounds
from memo.search.candidates import AUTO, FULL, SHARDINGS, Layout, Strategy, config_of
from memo.search.question import Question
from memo.search.state_costs import Costs, Room
from memo.search.states import fits, place, shortage
from memo.simulate import StepPrediction

_ACTIVATIONS = (AUTO, FULL)
"""alpha auto also tries to keep all activations."""


@dataclass(frozen=True)
class PlacedChoice:
    """A candidate that fits, simulated. `moved`: tiles by group, where activations swap."""

    layout: Layout
    strategy: Strategy
    step: StepPrediction
    moved: Mapping[str, int] | None


@dataclass
class Crowd:
    """What became of crowded layouts: those that fit when placed, and why others do not."""

    choices: list[PlacedChoice] = field(default_factory=list)
    too_large: dict[Layout, str] = field(default_factory=dict)
    num_candidates: int = 0


def costs_of(question: Question, layout: Layout, strategy: Strategy) -> Costs:
    """Of a layout, under the activations and the sharding of a strategy."""
    room = Room(
        FITS_SHARE * USABLE_SHARE * question.room.gpu_bytes,
        node_budget_bytes(question.room.host_bytes, None),
        min(question.gpus, question.hardware.gpus_per_node),
    )
    return Costs(
        config_of(question, layout, strategy),
        question.gpus,
        question.hardware,
        room,
        question.account,
    )


def placed(question: Question, layout: Layout, strategy: Strategy, costs: Costs | None = None) -> PlacedChoice | None:
    """The fastest placement under the activations and the sharding of a strategy; None where nothing fits."""
    found = place(costs or costs_of(question, layout, strategy))
    if found is None:
        return None
    alpha = strategy.alpha if found.moved is not None or strategy.alpha != "auto" else "off"
    return PlacedChoice(layout, replace(strategy, alpha=alpha, placement=found.placement), found.step, found.moved)


def strategies(question: Question, layout: Layout) -> Iterator[Strategy]:
    """Ways to try; without other ranks to share with, ZeRO-2 and ZeRO-3 are ZeRO-1."""
    shardings = SHARDINGS if question.gpus // (layout.tp * layout.pp) > 1 else SHARDINGS[:1]
    for activations in _ACTIVATIONS:
        yield from (replace(activations, sharding=sharding) for sharding in shardings)


def place_crowded(question: Question, crowded: Sequence[Layout], bounds: Bounds, count: int, below_s: float) -> Crowd:
    """The best of `count` grids that take less than `below_s`."""
    crowd = Crowd()
    best: dict[tuple[int, int, int], PlacedChoice] = {}
    dead: set[object] = set()
    tries = [
        (bounds.least_placed_s(layout, strategy), index, strategy)
        for index, layout in enumerate(crowded)
        for strategy in strategies(question, layout)
    ]
    for bound_s, index, strategy in sorted(tries, key=lambda entry: entry[:2]):
        layout = crowded[index]
        grid, smaller = (layout.tp, layout.cp, layout.pp), (replace(layout, mbs=1, cp_comm_type="p2p"), strategy)
        times = sorted(choice.step.step_time_s for choice in best.values())
        last_s = times[count - 1] if len(times) >= count else below_s
        if bound_s >= last_s:
            break
        if (smaller, layout.mbs) in dead or (grid in best and bound_s >= best[grid].step.step_time_s):
            continue
        crowd.num_candidates += 1
        costs = costs_of(question, layout, strategy)
        if not fits(costs):
            crowd.too_large.setdefault(layout, shortage(costs))
            dead |= {(smaller, size) for size in _larger(question, layout.mbs)}
            continue
        choice = placed(question, layout, strategy, costs)
        if choice is not None and choice.step.step_time_s < min(below_s, _step_s(best.get(grid))):
            best[grid] = choice
    crowd.choices = sorted(best.values(), key=_step_s)[:count]
    for choice in crowd.choices:
        crowd.too_large.pop(choice.layout, None)
    return crowd


def _larger(question: Question, mbs: int) -> Iterator[int]:
    while mbs <= question.global_batch_size:
        yield mbs
        mbs *= 2


def _step_s(choice: PlacedChoice | None) -> float:
    return inf if choice is None else choice.step.step_time_s
