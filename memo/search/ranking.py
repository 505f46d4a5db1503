"""The fastest layouts that fit: memory first, which is cheap, then time, for the most promising ones first.

every grid tp x cp x pp      -> what memo cannot run: refused
its pipelines and batches    -> memory of every strategy: refused, unsure or fits
what fits                    -> a bound on its speed (memo.search.bounds); simulated in order of the bound, until
                                the next one lies below the last one shown, so nothing that is faster is missed
what moves at alpha auto     -> a given alpha tried instead, from the grid
the fastest                  -> of those as good as the best the one with most room comes first, and none that is tight
                                before another within its error; where a tight one stands for its grid, another of the
                                candidates that leaves room is looked for
what is unsure and faster    -> shown; one that is faster by more than TRIAL_GAIN as what to try first, its risk beside
what fits under no strategy  -> ZeRO-2, ZeRO-3 and states in host memory, if nothing else fits (memo.search.oversized)
"""

import heapq
from collections.abc import Sequence
from math import inf

from memo.estimate.time_errors import TIE_SHARE
from memo.estimate.verdict import Verdict
from memo.search.bounds import Bounds
from memo.search.candidates import AUTO, GRID, KEEP, Layout, Strategy, can_tile, config_of, refusal
from memo.search.oversized import PlacedLayouts, Timed, place_oversized, placed, step_s, strategies
from memo.search.plan import Choice, Plan, as_good, speed_error
from memo.search.question import Question
from memo.search.sifting import STRATEGIES, Refusal, sift
from memo.search.sizing import size
from memo.search.swap_choice import SwapChoice, choose_swap, given_swaps
from memo.search.sweeping import sweeps
from memo.simulate import predict_step

NUM_UNSURE = 3
"""Shown of those that may or may not fit."""
ENOUGH_SHARE = 0.1
"""Of a GPU's memory: room that no plan needs more of. What torch does not see has been foreseen wrongly by 3 GiB at
most (NCCL issue 1685: 4.34 GB where 1.06 were expected), and more room is no reason to take a slower plan."""
NOTHING_BINDS = "nothing: all activations stay on the GPU"


def search(question: Question, *, top: int = 10, everything: bool = False, below_s: float = inf) -> Plan:
    """The `top` best grids that fit, or `everything` that fits. Raises ConfigError for a machine without bf16.

    `below_s`: where states must move, only steps that take less are looked for, which is quicker.
    """
    sifted = sift(question, with_shares=everything)
    race = _Race(question, everything)
    fastest = race.run(sifted.fits, max(1, len(sifted.fits)) if everything else top)
    if not everything:
        fastest = sorted(map(race.refined, fastest), key=step_s)
    choices = tuple(_sized(question, timed) for timed in fastest)
    below_s = min([below_s, *map(step_s, choices)])
    wanted = {"needed": not choices, "always": True, "never": False}[question.place_states]
    placed_layouts = place_oversized(question, sifted.oversized if wanted else (), race.bounds, top, below_s)
    placed_choices = [_sized(question, timed) for timed in placed_layouts.choices]
    choices = _best_of_grids([*choices, *placed_choices], None if everything else top)
    faster = race.run(sifted.unsure, NUM_UNSURE, below_s=min(map(step_s, choices), default=inf))
    choices = _best_first(question, choices)
    if not everything:
        choices = _with_room(question, choices, race, sifted.fits)
    unsure = tuple(_sized(question, timed) for timed in faster)
    refusals = _after_placing(sifted.refused, placed_layouts)
    num_fitting = len(sifted.fits) + len(placed_layouts.choices)
    return Plan(question, choices, unsure, refusals, sifted.num_candidates + placed_layouts.num_candidates, num_fitting)


def evaluate(question: Question, layout: Layout, strategy: Strategy, swap: SwapChoice | None = None) -> Choice:
    """One candidate in full, fitting or not; `swap` is of alpha auto, where it is known already."""
    return _sized(question, _timed(question, layout, strategy, swap))


def _sized(question: Question, timed: Timed) -> Choice:
    return Choice(**vars(timed), sized=size(question, timed.layout, timed.strategy, timed.moved, exactly=True))


def _timed(question: Question, layout: Layout, strategy: Strategy, swap: SwapChoice | None = None) -> Timed:
    """`swap` is of alpha auto, where it is known already."""
    moved: dict[str, int] | None = None
    limit = NOTHING_BINDS if strategy == KEEP else "device memory"
    if strategy.alpha == "auto":
        swap = swap or _swap_choice(question, layout, strategy)
        moved, limit = swap.tiles, str(swap.limit)
    step = predict_step(config_of(question, layout, strategy), question.gpus, question.hardware, moved)
    return Timed(layout, strategy, step, limit, moved)


def _best_of_grids(choices: list[Choice], count: int | None) -> tuple[Choice, ...]:
    """Fastest first; all of them where no count is given."""
    ranked = sorted(choices, key=step_s)
    if count is None:
        return tuple(ranked)
    best: dict[object, Choice] = {}
    for choice in ranked:
        best.setdefault(choice.layout.grid, choice)
    return tuple(best.values())[:count]


def _best_first(question: Question, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """`choices`, fastest first, but for the best, which comes before all.

    It is the one with most room on the GPU among those that are as good as the fastest, where room beyond ENOUGH_SHARE
    counts no more and the faster one wins. If all of them are tight, it is the fastest one that is not, as far as the
    error of its speed allows that it is the fastest.
    """
    if not choices:
        return choices
    enough = ENOUGH_SHARE * question.capacity.gpu_bytes
    best = max(as_good(choices, TIE_SHARE), key=lambda choice: min(choice.sized.room_bytes, enough))
    if best.sized.is_tight:
        near = as_good(choices, speed_error(question, best).share)
        best = next((choice for choice in near if not choice.sized.is_tight), best)
    return best, *(choice for choice in choices if choice is not best)


def _with_room(
    question: Question, choices: tuple[Choice, ...], race: "_Race", fits: Sequence[tuple[Layout, Strategy]]
) -> tuple[Choice, ...]:
    """`choices`, best first; where a tight one stands for its grid and no slower than the best, perhaps another of the
    candidates leaves room and is faster than the best, or near it if that is tight as well."""
    if not choices or not any(each.sized.is_tight for each in choices if step_s(each) <= step_s(choices[0])):
        return choices
    most_s = step_s(choices[0])
    if choices[0].sized.is_tight:
        most_s = (1.0 + speed_error(question, choices[0]).share) * min(map(step_s, choices))
    roomy = [_sized(question, timed) for timed in race.run(fits, 1, below_s=most_s, leaves_room=True)]
    return _best_first(question, tuple(sorted([*choices, *roomy], key=step_s)))


def _after_placing(refused: list[Refusal], placed_layouts: PlacedLayouts) -> tuple[Refusal, ...]:
    """Without the layouts that fit now, and with what is missing to those that do not even so."""
    fitting = {choice.layout for choice in placed_layouts.choices}
    left = [refusal for refusal in refused if refusal.layout not in fitting]
    too_large = placed_layouts.too_large
    return tuple(each.and_also(too_large[each.layout]) if each.layout in too_large else each for each in left)


def _swap_choice(question: Question, layout: Layout, strategy: Strategy) -> SwapChoice:
    return choose_swap(config_of(question, layout, strategy), question.account, question.hardware, question.capacity)


def explain(question: Question, layout: Layout) -> tuple[str, list[Choice]]:
    """One layout under every strategy, fastest first; or, with nothing else, why memo cannot run it."""
    why = refusal(question, layout)
    if why:
        return why, []
    ways = [*STRATEGIES, *sweeps(question, layout), *(share for share in GRID if can_tile(question, layout))]
    choices = [evaluate(question, layout, way) for way in ways]
    if not any(choice.sized.verdict == Verdict.FITS for choice in choices):
        found = [placed(question, layout, strategy) for strategy in strategies(question, layout)]
        choices += [_sized(question, timed) for timed in found if timed is not None]
    return "", sorted(choices, key=step_s)


class _Race:
    """Simulates candidates in order of what they take at least, until the rest cannot win any more."""

    def __init__(self, question: Question, everything: bool) -> None:
        self.question, self.everything = question, everything
        self.bounds = Bounds(question)

    def run(
        self, pool: Sequence[tuple[Layout, Strategy]], count: int, below_s: float = inf, leaves_room: bool = False
    ) -> list[Timed]:
        """The best of `count` grids, or of all candidates one by one; only those that take less than `below_s`, and, if
        asked for, that are not tight."""
        queue: list[tuple[float, int, SwapChoice | None]] = [
            (self.bounds.least_s(layout, strategy), index, None) for index, (layout, strategy) in enumerate(pool)
        ]
        heapq.heapify(queue)
        best: dict[object, Timed] = {}
        while queue:
            bound_s, index, swap = heapq.heappop(queue)
            last_s = sorted(map(step_s, best.values()))[count - 1] if len(best) >= count else below_s
            if bound_s >= last_s:
                break
            layout, strategy = pool[index]
            key = index if self.everything else layout.grid
            if bound_s >= step_s(best.get(key)):
                continue
            # What moves gives a better bound before anything is simulated.
            if strategy.alpha == "auto" and swap is None:
                swap = _swap_choice(self.question, layout, strategy)
                heapq.heappush(queue, (self.bounds.least_s(layout, strategy, swap), index, swap))
                continue
            moved = None if swap is None else swap.tiles
            if leaves_room and size(self.question, layout, strategy, moved, exactly=True).is_tight:
                continue
            timed = _timed(self.question, layout, strategy, swap)
            if step_s(timed) < min(below_s, step_s(best.get(key))):
                best[key] = timed
        return sorted(best.values(), key=step_s)[:count]

    def refined(self, choice: Timed) -> Timed:
        """The best of alpha auto and of the given ones that fit on its layout; any other choice as it is."""
        question, layout = self.question, choice.layout
        if choice.strategy != AUTO or not can_tile(question, layout):
            return choice
        alphas = [float(share.alpha) for share in GRID]
        swaps = given_swaps(config_of(question, layout, AUTO), question.gpus, question.hardware, alphas)
        least_s = [self.bounds.least_s(layout, share, swap) for share, swap in zip(GRID, swaps, strict=True)]
        faster = [share for share, bound_s in zip(GRID, least_s, strict=True) if bound_s < step_s(choice)]
        fitting = [share for share in faster if self._may_replace(choice, share)]
        return min([choice, *(_timed(question, layout, share) for share in fitting)], key=step_s)

    def _may_replace(self, choice: Timed, share: Strategy) -> bool:
        """Whether a given share fits, and leaves room unless alpha auto could not either."""
        sized = size(self.question, choice.layout, share)
        is_tight = size(self.question, choice.layout, AUTO, choice.moved).is_tight
        return sized.verdict == Verdict.FITS and (is_tight or not sized.is_tight)
