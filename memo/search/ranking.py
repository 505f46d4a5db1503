"""The fastest layouts that fit: the race of all candidates (memo.search.race), and the steps after it.

alpha auto                   -> the given alphas of GRID are tried in its place
the fastest                  -> among choices as good as the fastest, one with room comes first (`_best_first`,
                                `_with_room`)
unsure and faster            -> shown; if faster by more than TRIAL_GAIN, as the choice to try first, with its risk
whole states                 -> where whole layers have no room beside them, ZeRO-2, ZeRO-3 and states in host memory
                                are tried if nothing fits, or if they may be faster by more than TIE_SHARE
"""

from collections.abc import Container
from math import inf

from memo.estimate.time_errors import TIE_SHARE
from memo.estimate.verdict import Verdict
from memo.search.candidates import AUTO, GRID, Layout, Strategy, can_tile, refusal
from memo.search.placed import placed, placed_strategies
from memo.search.plan import Choice, Plan, Timed, as_good, speed_error, step_s
from memo.search.question import Question
from memo.search.race import STRATEGIES, Race, timed
from memo.search.sizing import size
from memo.search.sweeping import sweeps

NUM_UNSURE = 3
"""Number of unsure candidates that are shown."""
ENOUGH_SHARE = 0.1
"""Share of a GPU's memory beyond which more room does not count. Predictions of the memory that torch does not see were
wrong by 3 GiB at most (NCCL issue 1685: 4.34 GB where 1.06 were expected); more room is no reason for a slower plan."""


def search(
    question: Question,
    *,
    top: int = 10,
    everything: bool = False,
    below_s: float = inf,
    among: Container[Layout] | None = None,
) -> Plan:
    """Return the `top` best grids that fit, or `everything` that fits. Raises ConfigError for a machine without bf16.

    `below_s`: if states must move, only steps shorter than this are searched for, which is quicker. `among`: the
    layouts that are tried; None: all.
    """
    race = Race(question, everything, among)
    fastest = race.run(inf if everything else top)
    if not everything:
        fastest = sorted((_refined(race, choice) for choice in fastest), key=step_s)
    choices = [_sized(question, each) for each in fastest]
    with_placed: list[Timed] = []
    if question.place_states != "never":
        # Beside choices with whole states that leave room, which are simpler, only those that are clearly faster count.
        gain = 1.0 if all(choice.sized.is_tight for choice in choices) else 1.0 + TIE_SHARE
        least_s = min(map(step_s, choices), default=inf) / gain
        with_placed = race.run_placed(top, min(below_s, least_s), slower=TIE_SHARE if choices else inf)
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


def evaluate(question: Question, layout: Layout, strategy: Strategy) -> Choice:
    """Return one candidate with time and memory, fitting or not."""
    return _sized(question, timed(question, layout, strategy))


def explain(question: Question, layout: Layout) -> tuple[str, list[Choice]]:
    """Return ("", choices): one layout under every strategy, fastest first; or (why memo cannot run it, [])."""
    why = refusal(question, layout)
    if why:
        return why, []
    ways = [*STRATEGIES, *sweeps(question, layout), *(share for share in GRID if can_tile(question, layout))]
    choices = [evaluate(question, layout, way) for way in ways]
    if question.place_states != "never" and layout.vpp == 1:
        found = [placed(question, layout, strategy) for strategy in placed_strategies(question, layout)]
        choices += [_sized(question, each) for each in found if each is not None]
    return "", sorted(choices, key=step_s)


def _sized(question: Question, each: Timed) -> Choice:
    return Choice(**vars(each), sized=size(question, each.layout, each.strategy, each.moved))


def _refined(race: Race, choice: Timed) -> Timed:
    """Return the best of a choice of alpha auto and of given alphas on its layout; all other choices unchanged.

    A given alpha must fit, and must leave room if alpha auto does.
    """
    question, layout = race.question, choice.layout
    if choice.strategy != AUTO or not can_tile(question, layout):
        return choice
    best, is_tight = choice, size(question, layout, AUTO, choice.moved).is_tight
    for share in GRID:
        sized = size(question, layout, share)
        if sized.verdict == Verdict.FITS and (is_tight or not sized.is_tight):
            best = min(best, timed(question, layout, share, layer=race.bounds.layer(layout, share)), key=step_s)
    return best


def _best_of_grids(choices: list[Choice], count: int | None) -> list[Choice]:
    """Return the fastest choice of each of the first `count` grids, fastest first; all choices if `count` is None."""
    ranked = sorted(choices, key=step_s)
    if count is None:
        return ranked
    best: dict[object, Choice] = {}
    for choice in ranked:
        best.setdefault(choice.layout.grid, choice)
    return list(best.values())[:count]


def _best_first(question: Question, choices: list[Choice]) -> list[Choice]:
    """Return `choices`, which are sorted by speed, with the best one moved to the front.

    The best has most room on the GPU among the choices as good as the fastest. Room beyond ENOUGH_SHARE does not count,
    and with equal room the faster choice wins. If all these choices are tight, the best is the fastest roomy choice, as
    long as the error of its speed allows that it is the fastest.
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
    """Return `choices`, best first, with a roomy candidate added if there is a better one.

    It is searched for if a tight choice, no slower than the best, represents its grid. It must be faster than the best,
    or, if the best is tight, within the error of its speed.
    """
    if not choices or not any(each.sized.is_tight for each in choices if step_s(each) <= step_s(choices[0])):
        return choices
    most_s = step_s(choices[0])
    if choices[0].sized.is_tight:
        most_s = (1.0 + speed_error(question, choices[0]).share) * min(map(step_s, choices))
    roomy = [_sized(question, each) for each in race.run(1, most_s, leaves_room=True)]
    return _best_first(question, sorted([*choices, *roomy], key=step_s))
