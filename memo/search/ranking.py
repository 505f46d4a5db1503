"""The fastest layouts that fit: the race of all candidates (memo.search.race), and what follows from it.

what moves at alpha auto     -> a given alpha tried instead, from the grid
the fastest                  -> of those as good as the best the one with most room comes first, and none that is tight
                                before another within its error; where a tight one stands for its grid, another of the
                                candidates that leaves room is looked for
what is unsure and faster    -> shown; one that is faster by more than TRIAL_GAIN as what to try first, its risk beside
what fits under no strategy  -> ZeRO-2, ZeRO-3 and states in host memory, if nothing else fits
"""

from math import inf

from memo.estimate.time_errors import TIE_SHARE
from memo.estimate.verdict import Verdict
from memo.search.candidates import AUTO, GRID, Layout, Strategy, can_tile, config_of, refusal
from memo.search.plan import Choice, Plan, Timed, as_good, speed_error, step_s
from memo.search.question import Question
from memo.search.race import STRATEGIES, Race, placed, placed_strategies, timed
from memo.search.sizing import size
from memo.search.swap_choice import SwapChoice, given_swaps
from memo.search.sweeping import sweeps

NUM_UNSURE = 3
"""Shown of those that may or may not fit."""
ENOUGH_SHARE = 0.1
"""Of a GPU's memory: room that no plan needs more of. What torch does not see has been foreseen wrongly by 3 GiB at
most (NCCL issue 1685: 4.34 GB where 1.06 were expected), and more room is no reason to take a slower plan."""


def search(question: Question, *, top: int = 10, everything: bool = False, below_s: float = inf) -> Plan:
    """The `top` best grids that fit, or `everything` that fits. Raises ConfigError for a machine without bf16.

    `below_s`: where states must move, only steps that take less are looked for, which is quicker.
    """
    race = Race(question, everything)
    fastest = race.run(inf if everything else top)
    if not everything:
        fastest = sorted((_refined(race, choice) for choice in fastest), key=step_s)
    choices = [_sized(question, each) for each in fastest]
    is_needed = all(choice.sized.is_tight for choice in choices)  # also if there is none
    wanted = {"needed": is_needed, "always": True, "never": False}[question.place_states]
    with_placed = race.run_placed(top, min([below_s, *map(step_s, choices)])) if wanted else []
    choices = _best_of_grids([*choices, *(_sized(question, each) for each in with_placed)], None if everything else top)
    best_s = min(map(step_s, choices), default=inf)
    unsure = tuple(_sized(question, each) for each in race.run(NUM_UNSURE, best_s, Verdict.UNSURE))
    choices = _best_first(question, choices)
    if not everything:
        choices = _with_room(question, choices, race)
    fitting = {each.layout for each in with_placed}
    return Plan(
        question,
        tuple(choices),
        unsure,
        tuple(refused for refused in race.refusals if refused.layout not in fitting),
        num_candidates=race.num_looked_at,
        num_fitting=len(race.fitting) + len(with_placed),
    )


def evaluate(question: Question, layout: Layout, strategy: Strategy, swap: SwapChoice | None = None) -> Choice:
    """One candidate in full, fitting or not; `swap` is of alpha auto, where it is known already."""
    return _sized(question, timed(question, layout, strategy, swap))


def explain(question: Question, layout: Layout) -> tuple[str, list[Choice]]:
    """One layout under every strategy, fastest first; or, with nothing else, why memo cannot run it."""
    why = refusal(question, layout)
    if why:
        return why, []
    ways = [*STRATEGIES, *sweeps(question, layout), *(share for share in GRID if can_tile(question, layout))]
    choices = [evaluate(question, layout, way) for way in ways]
    if not any(choice.sized.verdict == Verdict.FITS for choice in choices):
        found = [placed(question, layout, strategy) for strategy in placed_strategies(question, layout)]
        choices += [_sized(question, each) for each in found if each is not None]
    return "", sorted(choices, key=step_s)


def _sized(question: Question, each: Timed) -> Choice:
    return Choice(**vars(each), sized=size(question, each.layout, each.strategy, each.moved))


def _refined(race: Race, choice: Timed) -> Timed:
    """The best of alpha auto and of the given ones that fit on its layout, and leave room unless alpha auto could not
    either; any other choice as it is."""
    question, layout = race.question, choice.layout
    if choice.strategy != AUTO or not can_tile(question, layout):
        return choice
    alphas = [float(share.alpha) for share in GRID]
    config, layer = config_of(question, layout, AUTO), race.bounds.layer(layout, AUTO)
    swaps = given_swaps(config, question.gpus, question.hardware, alphas, layer)
    best, is_tight = choice, size(question, layout, AUTO, choice.moved).is_tight
    for share, swap in zip(GRID, swaps, strict=True):
        if race.bounds.least_s(layout, share, swap) < step_s(best):
            sized = size(question, layout, share)
            if sized.verdict == Verdict.FITS and (is_tight or not sized.is_tight):
                best = min(best, timed(question, layout, share, layer=layer), key=step_s)
    return best


def _best_of_grids(choices: list[Choice], count: int | None) -> list[Choice]:
    """Fastest first; all of them where no count is given."""
    ranked = sorted(choices, key=step_s)
    if count is None:
        return ranked
    best: dict[object, Choice] = {}
    for choice in ranked:
        best.setdefault(choice.layout.grid, choice)
    return list(best.values())[:count]


def _best_first(question: Question, choices: list[Choice]) -> list[Choice]:
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
    return [best, *(choice for choice in choices if choice is not best)]


def _with_room(question: Question, choices: list[Choice], race: Race) -> list[Choice]:
    """`choices`, best first; where a tight one stands for its grid and no slower than the best, perhaps another of the
    candidates leaves room and is faster than the best, or near it if that is tight as well."""
    if not choices or not any(each.sized.is_tight for each in choices if step_s(each) <= step_s(choices[0])):
        return choices
    most_s = step_s(choices[0])
    if choices[0].sized.is_tight:
        most_s = (1.0 + speed_error(question, choices[0]).share) * min(map(step_s, choices))
    roomy = [_sized(question, each) for each in race.run(1, most_s, leaves_room=True)]
    return _best_first(question, sorted([*choices, *roomy], key=step_s))
