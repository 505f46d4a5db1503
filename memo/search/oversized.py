"""Layouts that do not fit on the GPUs with ZeRO-1: tries ZeRO-2, ZeRO-3 and states in host memory.

Candidates are tried in order of a lower bound of their time, as long as the bound is below the time of the best found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import inf
from typing import get_args

from memo.config.derived import SWEPT_TOKENS
from memo.config.parallel import AccumulationOrder, DataParallelSharding
from memo.estimate.unseen_memory import unseen_memory
from memo.estimate.verdict import room_for_unseen
from memo.search.bounds import Bounds
from memo.search.candidates import AUTO, FULL, SHARDINGS, Layout, Strategy, config_of, num_microbatches
from memo.search.question import Question
from memo.search.sizing import may_fit
from memo.search.state_costs import Costs
from memo.search.states import fits, least_s, place, shortage
from memo.search.sweeping import sweeps
from memo.simulate import StepPrediction

_ACTIVATIONS = (AUTO, FULL)
"""Uses of activations that are tried; alpha auto includes keeping all of them on the device."""
_LEAST_GAIN = 0.005
"""Of a step, for which breadth first is worth its memory: it keeps the activations of all microbatches at once."""


@dataclass(frozen=True)
class Timed:
    """A candidate with its simulated step.

    Attributes:
        limit: what kept it from a faster strategy.
        moved: tiles by group under alpha auto.
    """

    layout: Layout
    strategy: Strategy
    step: StepPrediction
    limit: str
    moved: Mapping[str, int] | None


def step_s(choice: Timed | None) -> float:
    return inf if choice is None else choice.step.step_time_s


@dataclass
class PlacedLayouts:
    """The oversized layouts that fit under some placement, and for the others the reason why they do not."""

    choices: list[Timed] = field(default_factory=list)
    too_large: dict[Layout, Callable[[], str]] = field(default_factory=dict)
    num_candidates: int = 0


def costs_of(question: Question, layout: Layout, strategy: Strategy, leaves_room: bool = False) -> Costs:
    """The costs of a layout under the activations and the sharding of a strategy.

    `leaves_room`: on a GPU that is smaller by what a run that is not tight leaves free.
    """
    config, limits = config_of(question, layout, strategy), question.limits
    if leaves_room:
        room = room_for_unseen(unseen_memory(config, question.gpus, limits.links))
        limits = replace(limits, device_bytes=limits.device_bytes - room)
    return Costs(config, question.gpus, question.hardware, limits)


def placed(question: Question, layout: Layout, strategy: Strategy, costs: Costs | None = None) -> Timed | None:
    """The fastest placement under the activations and the sharding of a strategy; None if none fits.

    Where some leave room for more of what torch does not see, it is the fastest of these.
    """
    roomy = costs_of(question, layout, strategy, leaves_room=True)
    found = place(roomy if fits(roomy) else costs or costs_of(question, layout, strategy))
    if found is None:
        return None
    alpha = strategy.alpha if found.moved is not None or strategy.alpha != "auto" else "off"
    where = replace(strategy, alpha=alpha, placement=found.placement)
    return Timed(layout, where, found.step, "device memory", found.moved)


def strategies(question: Question, layout: Layout) -> Iterator[Strategy]:
    """The strategies to try. Breadth first needs a single stage, and differs only with several microbatches."""
    is_choice = layout.pp == 1 and num_microbatches(question, layout) > 1
    orders = get_args(AccumulationOrder) if is_choice else ("depth_first",)
    uses = (*_ACTIVATIONS, *sweeps(question, layout))
    for activations, order, sharding in product(uses, orders, _shardings(question, layout)):
        yield replace(activations, order=order, sharding=sharding)


def frugal_strategies(question: Question, layout: Layout) -> Iterator[Strategy]:
    """Those that need least: without breadth first and ZeRO-2, which only need more, and with the smallest tiles."""
    uses = (*_ACTIVATIONS, *sweeps(question, layout, sizes=SWEPT_TOKENS[-1:]))
    shardings = (sharding for sharding in _shardings(question, layout) if sharding != "optim_grads")
    return (replace(use, sharding=sharding) for use, sharding in product(uses, shardings))


def _shardings(question: Question, layout: Layout) -> Sequence[DataParallelSharding]:
    """With one rank in dp x cp there is nothing to shard, so ZeRO-2 and ZeRO-3 are left out."""
    return SHARDINGS if question.gpus // (layout.tp * layout.pp) > 1 else SHARDINGS[:1]


def place_oversized(
    question: Question, oversized: Sequence[Layout], bounds: Bounds, count: int, below_s: float
) -> PlacedLayouts:
    """The fastest placements of the `count` best grids among those whose step takes less than `below_s`."""
    placed_layouts = PlacedLayouts()
    best: dict[tuple[int, int, int], Timed] = {}
    waits: dict[tuple[Layout, Strategy], float] = {}  # of what fits, the share of a step that is not compute
    dead: set[object] = set()

    @cache
    def least_fits(layout: Layout, strategy: Strategy) -> bool:
        return may_fit(question, layout) and fits(costs_of(question, layout, strategy))

    tries = [
        (bounds.least_placed_s(layout, strategy), index, strategy)
        for index, layout in enumerate(oversized)
        for strategy in strategies(question, layout)
    ]
    for bound_s, index, strategy in sorted(tries, key=lambda entry: entry[:2]):
        layout = oversized[index]
        grid = layout.grid
        # The ways of attention under cp take about as much, but where layers are swept: there some gather all keys.
        alike = replace(layout, mbs=1, cp_comm_type=layout.cp_comm_type if strategy.tiles else "p2p")
        smaller = alike, strategy
        times = sorted(choice.step.step_time_s for choice in best.values())
        last_s = times[count - 1] if len(times) >= count else below_s
        if bound_s >= last_s:
            break
        limit_s = min(last_s, step_s(best.get(grid)))
        if (smaller, layout.mbs) in dead or bound_s >= limit_s:
            continue
        if waits.get((layout, replace(strategy, order="depth_first")), inf) < _LEAST_GAIN:
            continue  # breadth first has nothing to gain
        placed_layouts.num_candidates += 1
        costs = costs_of(question, layout, strategy)
        # Neither larger micro-batches nor breadth first fit where this does not; one microbatch alone adds nothing up.
        least = replace(layout, mbs=1), replace(strategy, order="depth_first")
        may_be_placed = num_microbatches(question, layout) == 1 or least_fits(*least)
        if not may_be_placed or not fits(costs):
            placed_layouts.too_large.setdefault(layout, partial(shortage, costs))
            dead |= {(smaller, size) for size in _larger(question, layout.mbs)}
            continue
        if least_s(costs, bound_s) >= limit_s:
            continue
        choice = placed(question, layout, strategy, costs)
        if choice is None:
            continue
        step = choice.step
        waits[layout, strategy] = 1 - step.resources["compute"] / step.step_time_s
        gain = _LEAST_GAIN if strategy.order == "breadth_first" else 0.0
        if step.step_time_s < min(below_s, (1 - gain) * step_s(best.get(grid))):
            best[grid] = choice
    placed_layouts.choices = sorted(best.values(), key=step_s)[:count]
    for choice in placed_layouts.choices:
        placed_layouts.too_large.pop(choice.layout, None)
    return placed_layouts


def _larger(question: Question, mbs: int) -> Iterator[int]:
    while mbs <= question.global_batch_size:
        yield mbs
        mbs *= 2
