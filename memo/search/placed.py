"""Strategies with placed states (ZeRO-2, ZeRO-3, states in host memory): which are tried, and what each costs."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import Any, get_args

from memo.config.derived import SWEPT_TOKENS
from memo.config.parallel import AccumulationOrder, DataParallelSharding
from memo.estimate.unseen_memory import unseen_memory
from memo.estimate.verdict import room_for_unseen
from memo.search.candidates import AUTO, FULL, SHARDINGS, Layout, Strategy, config_of, num_microbatches
from memo.search.plan import Timed
from memo.search.question import Question
from memo.search.state_costs import Costs
from memo.search.states import Contender, fits, place
from memo.search.sweeping import sweeps

_ACTIVATIONS = (AUTO, FULL)
"""Uses of activations that are tried when states move; alpha auto may also keep all activations on the device."""


def placed_strategies(question: Question, layout: Layout) -> Iterator[Strategy]:
    """Yield strategies to try with placed states. Breadth first needs one stage and several microbatches."""
    is_choice = layout.pp == 1 and num_microbatches(question, layout) > 1
    orders = get_args(AccumulationOrder) if is_choice else ("depth_first",)
    uses = (*_ACTIVATIONS, *sweeps(question, layout))
    for activations, order, sharding in product(uses, orders, _shardings(question, layout)):
        yield activations._replace(order=order, sharding=sharding)


def frugal_strategies(question: Question, layout: Layout) -> Iterator[Strategy]:
    """Yield the strategies that need least: the smallest tiles, without breadth first and ZeRO-2, which need more."""
    uses = (*_ACTIVATIONS, *sweeps(question, layout, sizes=SWEPT_TOKENS[-1:]))
    shardings = (sharding for sharding in _shardings(question, layout) if sharding != "optim_grads")
    return (use._replace(sharding=sharding) for use, sharding in product(uses, shardings))


def _shardings(question: Question, layout: Layout) -> Sequence[DataParallelSharding]:
    """Return the shardings to try; with one rank in dp x cp there is nothing to shard, so only ZeRO-1."""
    return SHARDINGS if question.gpus // (layout.tp * layout.pp) > 1 else SHARDINGS[:1]


def costs_of(question: Question, layout: Layout, strategy: Strategy, **known: Any) -> Costs:
    """Return the costs of a layout under the activations and the sharding of a strategy; `known` as in `Costs`."""
    return Costs(config_of(question, layout, strategy), question.gpus, question.hardware, question.limits, **known)


def fitting(question: Question, costs: Costs) -> Costs | None:
    """Return `costs` if some placement fits, with limits that leave room for memory that torch does not see if some
    placement fits under them; None if none fits."""
    room = room_for_unseen(unseen_memory(costs.config, question.gpus, costs.limits.links))
    with_room = costs.within(costs.limits._replace(device_bytes=costs.limits.device_bytes - room))
    return next((each for each in (with_room, costs) if fits(each)), None)


def placed(question: Question, layout: Layout, strategy: Strategy) -> Timed | None:
    """Return the fastest placement under the activations and the sharding of a strategy; None if none fits."""
    costs = fitting(question, costs_of(question, layout, strategy))
    return None if costs is None else fastest_placed(layout, strategy, costs)


def fastest_placed(
    layout: Layout, strategy: Strategy, costs: Costs, below_s: float = inf, among: Sequence[Contender] | None = None
) -> Timed | None:
    """Return the fastest placement under a strategy whose costs are given, with a step shorter than `below_s`; `among`
    as in `place`."""
    found = place(costs, below_s, among)
    if found is None:
        return None
    moved = found.use.moved
    alpha = strategy.alpha if moved is not None or strategy.alpha != "auto" else "off"
    where = strategy._replace(alpha=alpha, placement=found.placement)
    return Timed(layout, where, found.step, "device memory", moved)
