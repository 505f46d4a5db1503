"""How far one thing can be varied: whether anything fits, which memory it lacks, and how fast it is, along an axis.

An axis is a row of questions by a number, of which a larger one needs more of everything. The last one that fits is
found by doubling and bisection; one that must also be fast enough from there downwards, as small ones are slow as well.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, takewhile

from memo.config.derived import SWEPT_TOKENS
from memo.errors import ConfigError
from memo.estimate.verdict import Verdict
from memo.search.candidates import FULL, GRID, SELECTIVE, Layout, Strategy, exchanges, grids, refusal
from memo.search.question import Question
from memo.search.race import costs_of, frugal_strategies
from memo.search.ranking import search
from memo.search.sizing import may_fit, size
from memo.search.states import fits as can_be_placed
from memo.search.states import least_excess, moves_any, shortage
from memo.search.sweeping import sweeps

_FRUGAL = (GRID[0], FULL, SELECTIVE)
"""What needs least: all else lies between, in GPU memory and in host memory."""
_ROUNDING = 1e-9
"""A speed that is exactly reached counts."""
_MOST_DOUBLINGS = 6
"""So much more of one thing is looked at; who needs more has another model in mind."""


class Axis:
    """Whether the questions of an axis fit, and how fast they are; the layout that held the last one is tried first."""

    def __init__(self, questions: Callable[[int], Sequence[Question]], parts: float = math.inf) -> None:
        """`questions`: by number, alternatives, of which one suffices; `parts`: of a number, to which an answer is
        exact."""
        self.questions, self._parts = cache(questions), parts
        self._last: Layout | None = None
        self.fastest = cache(self._find_fastest)

    def fitting(self, number: int) -> Question | None:
        return next((question for question in self.questions(number) if self._fits(question)), None)

    def _fits(self, question: Question) -> bool:
        self._last = fitting_layout(question, self._last)
        return self._last is not None

    def last_fitting(self, low: int = 0, stride: int = 1, most: float = math.inf) -> tuple[int, int]:
        """The last number from `low` (which fits, or is 0) to `most` that fits, and the next one, which does not;
        `stride`: to the number that is tried first, doubled as long as numbers fit."""
        high = low + stride
        while high <= most and self.fitting(high):
            stride *= 2 if low else 1
            low, high = high, high + stride
        return self._between(lambda number: self.fitting(number) is not None, low, high)

    def last_fast(self, high: int, min_tgs: float) -> tuple[int, int]:
        """The last number below `high`, which is too slow, that trains at `min_tgs`, and the next one; (0, 1) if none
        does."""

        def is_fast(number: int) -> bool:
            return self.fastest(number, min_tgs)[0] >= min_tgs

        low = _below(high)
        while low and not is_fast(low):
            low, high = _below(low), low
        return self._between(is_fast, low, high) if low else (0, high)

    def _find_fastest(self, number: int, least_tgs: float = 0.0) -> tuple[float, Question]:
        """(tokens per GPU and second, of which question); where none has `least_tgs`, the answer is quicker, and may
        be 0."""
        found = ((speed(question, least_tgs), question) for question in self.questions(number))
        return max(found, key=lambda pair: pair[0])

    def _between(self, holds: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
        """`low`, which holds, and `high`, which does not, moved towards each other."""
        step = max(1, int(low // self._parts))
        while high - low > step:
            middle = low + (high - low) // (2 * step) * step
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low, high


def _below(number: int) -> int:
    """The power of two below a number; 0 below 2."""
    return 1 << (number - 1).bit_length() - 1 if number > 1 else 0


def speed(question: Question, least_tgs: float = 0.0) -> float:
    """Tokens per GPU and second of the fastest layout that fits; 0 where none does.

    Where that is less than `least_tgs`, the answer is quicker, and may be 0 as well.
    """
    below_s = (1.0 + _ROUNDING) * question.tokens / question.gpus / least_tgs if least_tgs else math.inf
    best = search(question, top=1, below_s=below_s).best
    return 0.0 if best is None else best.step.tgs


def too_slow(what: str, tgs: float, min_tgs: float) -> str:
    return f"{what} train at no more than {tgs:,.0f} tokens per GPU and second, fewer than --min-tgs {min_tgs:g}"


def single_layouts(question: Question) -> Iterator[Layout]:
    """Micro-batches of 1, and stages of one chunk: several hold more."""
    return (layout for grid, why in grids(question) if not why for layout in exchanges(question, grid))


def fitting_layout(question: Question, first: Layout | None = None) -> Layout | None:
    """Some layout that fits; states may move, unless the question forbids that. `first` is tried before all others."""
    known = [] if first is None or refusal(question, first) else [first]
    for layout in chain(known, single_layouts(question)):
        if may_fit(question, layout) and any(_holds(question, layout, way) for way in _frugal(question, layout)):
            return layout
    return None


def _frugal(question: Question, layout: Layout) -> Iterator[Strategy]:
    """The strategies that need least."""
    if question.place_states != "never":
        return frugal_strategies(question, layout)
    return chain(sweeps(question, layout, 0.0, SWEPT_TOKENS[-1:]), _FRUGAL)  # the smallest tiles take least


def _holds(question: Question, layout: Layout, strategy: Strategy) -> bool:
    if question.place_states != "never":
        return can_be_placed(costs_of(question, layout, strategy))
    return size(question, layout, strategy).verdict == Verdict.FITS


def shortage_of(question: Question) -> str:
    """What comes nearest to fitting, and of which memory it lacks how much.

    Raises ConfigError where the GPUs cannot be laid out.
    """
    pairs = [(layout, strategy) for layout in single_layouts(question) for strategy in _frugal(question, layout)]
    if not pairs:
        why = next(why for _, why in grids(question) if why)
        raise ConfigError(f"--gpus {question.gpus} cannot be laid out: {why}")
    costs = {} if question.place_states == "never" else {pair: costs_of(question, *pair) for pair in pairs}
    nearest = min(pairs, key=lambda pair: least_excess(costs[pair]) if costs else size(question, *pair).excess)
    layout, strategy = nearest
    if costs and moves_any(costs[nearest]):
        lacks = shortage(costs[nearest])
    else:
        lacks = size(question, *nearest).shortage(question)
    return f"{lacks} with {question.seq_len:,} tokens under {layout}, {strategy}"


def least_doubling(vary: Callable[[int], Question]) -> Question | None:
    """The first of the questions with 2, 4, 8, ... times as much of one thing that fits; None if none does.

    From the most downwards, because what fits is soon found, but that nothing does only once all has been tried.
    """
    questions = (vary(1 << power) for power in range(_MOST_DOUBLINGS, 0, -1))
    return next(reversed(list(takewhile(fitting_layout, questions))), None)


def with_host(question: Question, times: int) -> Question:
    return replace(question, host_memory_gib=question.host_memory_gib * times)


def with_gpus(question: Question, times: int) -> Question:
    """Of full nodes, and no fewer sequences in a step than GPUs that each take one alone."""
    per_node = question.hardware.gpus_per_node
    gpus = question.gpus * times
    if gpus > per_node:
        gpus = -(-gpus // per_node) * per_node
    return question.with_gpus(gpus)
