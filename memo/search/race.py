"""A best-first search over candidates, ordered by lower bounds of their step time, until no candidate left can win.

    layout     a bound that holds for all its strategies   opened: the memory of each strategy is judged
    strategy   its own bound                               opened: simulated; under alpha auto the swap plan is chosen
                                                           first, which gives a better bound
    placed     ZeRO-2, ZeRO-3, states in host memory       opened: whether any placement fits, and a better bound;
                                                           opened again: the fastest placement

So the memory of slow layouts is never counted, and no faster candidate is missed.
"""

import heapq
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import count
from math import inf
from typing import NamedTuple

from memo.config.layer_words import LINEAR
from memo.estimate.verdict import Verdict
from memo.search.bounds import Bounds
from memo.search.candidates import (
    AUTO,
    FULL,
    GRID,
    KEEP,
    SELECTIVE,
    Layout,
    Strategy,
    can_tile,
    config_of,
    grids,
    layouts_of,
)
from memo.search.placed import costs_of, fastest_placed, fitting, placed_strategies
from memo.search.plan import Reason, Refusal, Timed, step_s
from memo.search.question import Question
from memo.search.sizing import Sized, may_fit, size
from memo.search.state_costs import Costs
from memo.search.states import Contender, contenders, shortage
from memo.search.swap_choice import SwapChoice, choose_swap
from memo.search.sweeping import sweeps, tile_sizes
from memo.simulate import predict_step
from memo.simulate.cost import LayerCost

STRATEGIES = (KEEP, AUTO, SELECTIVE, FULL)
"""Strategies that are tried on every layout."""
NOTHING_BINDS = "nothing: all activations stay on the GPU"
_LEAST_GAIN = 0.005
"""Least share of a step that breadth first must save: it keeps the activations of all microbatches at once."""
_TOO_LARGE = (Verdict.OOM, Verdict.OOHM)
_REASONS = {Verdict.OOM: Reason.GPU, Verdict.OOHM: Reason.HOST, Verdict.UNSURE: Reason.UNSURE}


class Entry(NamedTuple):
    """One or several candidates that may still win; `open` refines them, given the seconds that they must undercut."""

    bound_s: float
    number: int
    layout: Layout
    open: Callable[[float], Iterable["Entry | Timed"]]


class Race:
    """The search for one question; results about candidates are kept between its runs. `num_looked_at` counts the
    candidates whose memory was counted; `fitting` are those that fit and whose bound was not above the results found
    before."""

    def __init__(self, question: Question, everything: bool = False, among: Container[Layout] | None = None) -> None:
        """`everything`: try given alphas too, and rank each candidate instead of the best of each grid; `among`: the
        layouts that take part, None: all."""
        self._among = among
        self.question, self.everything, self.bounds = question, everything, Bounds(question)
        self.num_looked_at, self.fitting = 0, set[tuple[Layout, Strategy]]()
        self.judged: dict[Layout, dict[Strategy, Sized]] = {}
        self.ways = cache(self._find_ways)
        self._numbers = count()
        self._short_of: dict[Layout, Costs] = {}

    @cached_property
    def grids(self) -> list[tuple[Layout, str]]:
        return list(grids(self.question))

    @cached_property
    def _layouts(self) -> list[tuple[float, Layout]]:
        """All layouts that memo can run, each with a lower bound of its seconds under any strategy.

        The fastest strategy keeps everything, or works tile by tile, which hides messages of tp, and recomputes
        nothing.
        """
        least_s, found = self.bounds.least_s, []
        for grid, why in self.grids:
            ways = (KEEP, AUTO) if grid.tp > 1 else (KEEP,)
            for layout in () if why else layouts_of(self.question, grid):
                if self._among is not None and layout not in self._among:
                    continue
                found.append((min(least_s(layout, way) for way in ways), layout))
        return found

    def run(
        self, num: float, below_s: float = inf, verdict: Verdict = Verdict.FITS, *, leaves_room: bool = False
    ) -> list[Timed]:
        """Return the best candidates of `num` grids, fastest first.

        Only steps shorter than `below_s` count; with `leaves_room`, only candidates that are not tight.
        """
        entries = [
            self._entry(bound_s, layout, partial(self._strategies, layout, verdict, leaves_room))
            for bound_s, layout in self._layouts
        ]
        return self._first(entries, num, below_s, by_grid=not self.everything)

    def run_placed(self, num: int, below_s: float, slower: float) -> list[Timed]:
        """Return the best candidates with placed states, for layouts on which no whole layers fit otherwise and leave
        room.

        Only steps shorter than `below_s`, and longer than the fastest by at most the share `slower`, are searched for.
        """
        entries = []
        for _, layout in self._layouts:
            found = self.judged.get(layout, {})
            whole = (each for strategy, each in found.items() if not strategy.sweep.tiles)
            leaves_room = any(each.verdict == Verdict.FITS and not each.is_tight for each in whole)
            if layout.vpp == 1 and not leaves_room:
                bound_s = self.least_placed_s(layout)
                entries.append(self._entry(bound_s, layout, partial(self._placed_strategies, layout)))
        return self._first(entries, num, below_s, by_grid=True, slower=slower)

    def least_placed_s(self, layout: Layout) -> float:
        """Return the least seconds of a step under any strategy, if states may be anywhere.

        Delta nets take less time where they are swept; all other layers take more.
        """
        has_delta_nets = LINEAR in self.question.model.sizes.types_of_layers
        swept = sweeps(self.question, layout) if has_delta_nets else ()
        return min(self.bounds.least_placed_s(layout, way) for way in (AUTO, *swept))

    def _first(
        self, queue: list[Entry], num: float, below_s: float, *, by_grid: bool, slower: float = inf
    ) -> list[Timed]:
        heapq.heapify(queue)
        best: dict[object, Timed] = {}
        while queue:
            entry = heapq.heappop(queue)
            last_s = sorted(map(_raced_s, best.values()))[int(num) - 1] if len(best) >= num else below_s
            last_s = min(last_s, (1.0 + slower) * min(map(_raced_s, best.values()), default=inf))
            if entry.bound_s >= last_s:
                break
            key = entry.layout.grid if by_grid else entry.number
            limit_s = min(last_s, _raced_s(best[key])) if key in best else last_s
            if entry.bound_s >= limit_s:
                continue
            for found in entry.open(limit_s):
                if isinstance(found, Entry):
                    heapq.heappush(queue, found)
                elif _raced_s(found) < limit_s:
                    best[key] = found
        fastest = sorted(best.values(), key=step_s)
        return fastest if num == inf else fastest[: int(num)]

    def _entry(self, bound_s: float, layout: Layout, then: Callable[[float], Iterable[Entry | Timed]]) -> Entry:
        return Entry(bound_s, next(self._numbers), layout, then)

    def _strategies(self, layout: Layout, verdict: Verdict, leaves_room: bool, limit_s: float) -> Iterator[Entry]:
        for strategy in self.ways(layout):
            bound_s = self.bounds.least_s(layout, strategy)
            yield self._entry(bound_s, layout, partial(self._time, layout, strategy, verdict, leaves_room))

    def _time(
        self, layout: Layout, strategy: Strategy, verdict: Verdict, leaves_room: bool, limit_s: float
    ) -> Iterator[Entry | Timed]:
        if self.judge(layout, strategy).verdict != verdict:
            return
        if verdict == Verdict.FITS:
            self.fitting.add((layout, strategy))
        if strategy.alpha == "auto":
            swap = swap_choice(self.question, layout, strategy, self.bounds.layer(layout, strategy))
            bound_s = self.bounds.least_s(layout, strategy, swap)
            yield self._entry(bound_s, layout, partial(self._simulate, layout, strategy, leaves_room, swap))
        else:
            yield from self._simulate(layout, strategy, leaves_room, None, limit_s)

    def _simulate(
        self, layout: Layout, strategy: Strategy, leaves_room: bool, swap: SwapChoice | None, limit_s: float
    ) -> Iterator[Timed]:
        moved = None if swap is None else swap.tiles
        if not (leaves_room and size(self.question, layout, strategy, moved).is_tight):
            yield timed(self.question, layout, strategy, swap, self.bounds.layer(layout, strategy))

    def _find_ways(self, layout: Layout) -> list[Strategy]:
        """Return the strategies that may be a layout's fastest; some may not fit, and none are left if nothing fits.

        If keeping everything fits and leaves room, no other strategy can be faster. Swept layers move more bytes, in
        smaller kernels, so they are tried only if nothing else fits.
        """
        kept = self.judge(layout, KEEP)
        if kept.verdict == Verdict.FITS and not kept.is_tight:
            return [KEEP]
        ways = [*STRATEGIES, *(GRID if self.everything and can_tile(self.question, layout) else ())]
        if any(self.judge(layout, way).verdict == Verdict.FITS for way in ways):
            return ways
        smaller = _smaller(layout)
        if smaller is None or self.ways(smaller):
            ways += self._sweeps(layout)
        return [way for way in ways if self.judge(layout, way).verdict not in _TOO_LARGE]

    def _sweeps(self, layout: Layout) -> list[Strategy]:
        """Return the ways to sweep up to the first one that fits, in all tile sizes with which it fits.

        Larger tiles take less time; smaller tiles leave room for activations that would otherwise be recomputed.
        """
        found: list[Strategy] = []
        sizes = tile_sizes(config_of(self.question, layout))[::-1]
        for strategy in sweeps(self.question, layout, sizes=sizes):
            alike = [way for way in found if replace(way.sweep, tiles=strategy.sweep.tiles) == strategy.sweep]
            fitting = [way for way in found if self.judge(layout, way).verdict == Verdict.FITS]
            if any(way not in alike for way in fitting):
                break
            if all(way in fitting for way in alike):  # else smaller tiles did not fit, and these need more
                found.append(strategy)
        return found

    def judge(self, layout: Layout, strategy: Strategy) -> Sized:
        """Return the memory of a candidate.

        If it surely does not fit with half the micro-batch, or in one chunk, that smaller memory is returned as a lower
        bound, without counting again.
        """
        found = self.judged.setdefault(layout, {})
        if strategy not in found:
            smaller = _smaller(layout)
            below = None if smaller is None else self.judge(smaller, strategy)
            if below is not None and below.verdict in _TOO_LARGE:
                found[strategy] = below._replace(is_exact=False)
            else:
                self.num_looked_at += 1
                found[strategy] = size(self.question, layout, strategy)
        return found[strategy]

    @property
    def refusals(self) -> Iterator[Refusal]:
        """The layouts that memo cannot run, and the judged layouts on which no strategy fits."""
        yield from (Refusal(grid, Reason.LAYOUT, why.__str__) for grid, why in self.grids if why)
        for _, layout in self._layouts:
            found = self.judged.get(layout, {})
            verdicts = {sized.verdict for sized in found.values()}
            if found and Verdict.FITS not in verdicts:
                least = min(found.values(), key=lambda sized: sized.excess)
                reason = _REASONS[Verdict.OOM if verdicts == {Verdict.OOM} else least.verdict]
                yield Refusal(layout, reason, partial(self._why, layout, least))

    def _why(self, layout: Layout, least: Sized) -> str:
        costs = self._short_of.get(layout)
        return "; ".join([least.shortage(self.question), *([] if costs is None else [shortage(costs)])])

    def _placed_strategies(self, layout: Layout, limit_s: float) -> Iterator[Entry]:
        for strategy in placed_strategies(self.question, layout):
            bound_s = self.bounds.least_placed_s(layout, strategy) * _handicap(strategy)
            yield self._entry(bound_s, layout, partial(self._place, layout, strategy))

    def _place(self, layout: Layout, strategy: Strategy, limit_s: float) -> Iterator[Entry]:
        self.num_looked_at += 1
        costs = self.costs_that_fit(layout, strategy)
        if costs is None:
            self._short_of.setdefault(layout, costs_of(self.question, layout, strategy))
            return
        among = contenders(costs, limit_s)
        if among:
            bound_s = min(each.least_s for each in among) * _handicap(strategy)
            yield self._entry(bound_s, layout, partial(self._search_placed, layout, strategy, costs, among))

    def _search_placed(
        self, layout: Layout, strategy: Strategy, costs: Costs, among: list[Contender], limit_s: float
    ) -> Iterator[Timed]:
        found = fastest_placed(layout, strategy, costs, limit_s, among)
        if found is not None:
            yield found

    def costs_that_fit(self, layout: Layout, strategy: Strategy) -> Costs | None:
        """Return the costs of a layout under a strategy; None if no placement fits."""
        if not may_fit(self.question, layout):
            return None
        layer, bound = (
            partial(function, layout, strategy) for function in (self.bounds.layer, self.bounds.least_placed_s)
        )
        return fitting(self.question, costs_of(self.question, layout, strategy, layer=layer, bound=bound))


def timed(
    question: Question,
    layout: Layout,
    strategy: Strategy,
    swap: SwapChoice | None = None,
    layer: LayerCost | None = None,
) -> Timed:
    """Simulate a candidate, fitting or not; `swap` (the choice of alpha auto) and `layer` may be given if known."""
    moved: dict[str, int] | None = None
    limit = NOTHING_BINDS if strategy == KEEP else "device memory"
    if strategy.alpha == "auto":
        swap = swap or swap_choice(question, layout, strategy)
        moved, limit = swap.tiles, str(swap.limit)
    config = config_of(question, layout, strategy)
    step = predict_step(config, question.gpus, question.hardware, moved, layer=layer)
    return Timed(layout, strategy, step, limit, moved)


def swap_choice(question: Question, layout: Layout, strategy: Strategy, layer: LayerCost | None = None) -> SwapChoice:
    config = config_of(question, layout, strategy)
    return choose_swap(config, question.account, question.hardware, question.capacity, layer)


def _raced_s(choice: Timed) -> float:
    """Return the seconds of a step by which candidates are compared: breadth first has a handicap."""
    return choice.step.step_time_s * _handicap(choice.strategy)


def _handicap(strategy: Strategy) -> float:
    return 1.0 / (1.0 - _LEAST_GAIN) if strategy.order == "breadth_first" else 1.0


def _smaller(layout: Layout) -> Layout | None:
    """Return a layout that needs no more memory: with half the micro-batch, or with one chunk per stage."""
    if layout.mbs > 1:
        return layout._replace(mbs=layout.mbs // 2)
    return layout._replace(vpp=1) if layout.vpp > 1 else None
