"""How far one number can be raised: whether any layout fits, which memory is short, and how fast the run is.

An axis is a series of questions by a number, such as the sequence length; a larger number needs more of every resource.
Doubling and bisection find the last number that fits. If the run must also be fast enough, the search goes downwards
from there, because small numbers are slow as well.
"""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache
from itertools import chain, takewhile
from typing import NamedTuple

from memo.config.derived import SWEPT_TOKENS
from memo.errors import ConfigError
from memo.estimate.verdict import Verdict
from memo.search.candidates import FULL, GRID, SELECTIVE, Layout, Strategy, exchanges, grids, refusal
from memo.search.placed import costs_of, frugal_strategies
from memo.search.question import Question
from memo.search.ranking import search
from memo.search.sizing import may_fit, size
from memo.search.states import fits as can_be_placed
from memo.search.states import nearest, shortage
from memo.search.sweeping import sweeps

_FRUGAL = (GRID[0], FULL, SELECTIVE)
"""Strategies that need least GPU memory or host memory: all other strategies lie between them."""
_ROUNDING = 1e-9
"""Tolerance, so that a speed that is reached exactly counts."""
_MOST_DOUBLINGS = 6
"""Doublings of one resource that are tried: up to 64 times as much."""


class Axis:
    """The questions of an axis: whether they fit, and how fast they are. The last fitting layout is tried first."""

    def __init__(self, questions: Callable[[int], Sequence[Question]], parts: float = math.inf) -> None:
        """`questions`: gives alternatives for a number, of which one must fit; `parts`: an answer is exact to 1 / parts
        of its number."""
        self.questions, self._parts = cache(questions), parts
        self._last: Layout | None = None
        self.fastest = cache(self._find_fastest)

    def fitting(self, number: int) -> Question | None:
        return next((question for question in self.questions(number) if self._fits(question)), None)

    def _fits(self, question: Question) -> bool:
        self._last = fitting_layout(question, self._last)
        return self._last is not None

    def last_fitting(self, low: int = 0, stride: int = 1, most: float = math.inf) -> tuple[int, int]:
        """Return the last number from `low` to `most` that fits, and the next one, which does not fit.

        `low` fits, or is 0. `stride` leads to the number that is tried first, and doubles while numbers fit.
        """
        high = low + stride
        while high <= most and self.fitting(high):
            stride *= 2 if low else 1
            low, high = high, high + stride
        return self._between(lambda number: self.fitting(number) is not None, low, high)

    def last_fast(self, high: int, min_tgs: float) -> tuple[int, int]:
        """Return the last number below `high` that trains at `min_tgs`, and the next one; (0, 1) if there is none.

        `high` itself is too slow. A layout that is the fastest for one number often is for others too. So those found
        so far are tried first, and all layouts only for the number after the last one that is fast with these.
        """
        known = self.fastest(high).layouts

        def is_fast(number: int) -> bool:
            return any(fastest(each, min_tgs, known).tgs >= min_tgs for each in self.questions(number))

        low = _below(high)
        while low and not is_fast(low) and self.fastest(low).tgs < min_tgs:
            low, high = _below(low), low
        if not low:
            return 0, high
        while True:
            low, beyond = self._between(is_fast, low, high)
            if beyond == high or self.fastest(beyond).tgs < min_tgs:
                return low, beyond
            known, low = known | self.fastest(beyond).layouts, beyond

    def _find_fastest(self, number: int) -> "Fastest":
        """Return the fastest layout for the fastest alternative."""
        return max(map(fastest, self.questions(number)), key=lambda found: found.tgs)

    def _between(self, holds: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
        """Bisect between `low`, which holds, and `high`, which does not; return both as neighbours."""
        step = max(1, int(low // self._parts))
        while high - low > step:
            middle = low + (high - low) // (2 * step) * step
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low, high


def _below(number: int) -> int:
    """Return the largest power of two below a number; 0 if the number is below 2."""
    return 1 << (number - 1).bit_length() - 1 if number > 1 else 0


class Fastest(NamedTuple):
    """The fastest layout of a question, and its tokens per GPU and second; no layout and 0 if none fits."""

    question: Question
    layouts: frozenset[Layout]
    tgs: float


def fastest(question: Question, least_tgs: float = 0.0, among: Container[Layout] | None = None) -> Fastest:
    """Return the fastest layout that fits, `among` some layouts or all.

    If its speed is less than `least_tgs`, the answer comes sooner, and may also be that none fits.
    """
    below_s = (1.0 + _ROUNDING) * question.tokens / question.gpus / least_tgs if least_tgs else math.inf
    best = search(question, top=1, below_s=below_s, among=among).best
    if best is None:
        return Fastest(question, frozenset(), 0.0)
    return Fastest(question, frozenset((best.layout,)), best.step.tgs)


def too_slow(what: str, tgs: float, min_tgs: float) -> str:
    return f"{what} train at no more than {tgs:,.0f} tokens per GPU and second, fewer than --min-tgs {min_tgs:g}"


def single_layouts(question: Question) -> Iterator[Layout]:
    """Yield the layouts with micro-batches of 1 and stages of one chunk, which need least memory."""
    return (layout for grid, why in grids(question) if not why for layout in exchanges(question, grid))


def fitting_layout(question: Question, first: Layout | None = None) -> Layout | None:
    """Return some layout that fits; states may move unless the question forbids it. `first` is tried first."""
    known = [] if first is None or refusal(question, first) else [first]
    for layout in chain(known, single_layouts(question)):
        ways = _frugal(question, layout) if may_fit(question, layout) else ()
        if question.place_states != "never":
            if any(can_be_placed(costs_of(question, layout, way)) for way in ways):
                return layout
        elif any(size(question, layout, way).verdict == Verdict.FITS for way in ways):
            return layout
    return None


def _frugal(question: Question, layout: Layout) -> Iterator[Strategy]:
    """Return the strategies that need least memory."""
    if question.place_states != "never":
        return frugal_strategies(question, layout)
    return chain(sweeps(question, layout, 0.0, SWEPT_TOKENS[-1:]), _FRUGAL)  # the smallest tiles take least


def shortage_of(question: Question) -> str:
    """Return a text with the candidate that comes nearest to fitting, the memory that is short, and by how much.

    Raises ConfigError if no layout is possible on these GPUs.
    """
    pairs = [(layout, strategy) for layout in single_layouts(question) for strategy in _frugal(question, layout)]
    if not pairs:
        why = next(why for _, why in grids(question) if why)
        raise ConfigError(f"--gpus {question.gpus} cannot be laid out: {why}")
    costs = {} if question.place_states == "never" else {pair: costs_of(question, *pair) for pair in pairs}

    def excess(pair: tuple[Layout, Strategy]) -> float:
        return max(costs[pair].excess(*nearest(costs[pair]))) if costs else size(question, *pair).excess

    layout, strategy = pair = min(pairs, key=excess)
    moves_states = costs and nearest(costs[pair])[0].optimizer > 0
    lacks = shortage(costs[pair]) if moves_states else size(question, *pair).shortage(question)
    return f"{lacks} with {question.seq_len:,} tokens under {layout}, {strategy}"


def least_doubling(vary: Callable[[int], Question]) -> Question | None:
    """Return the first question with 2, 4, 8, ... times as much of one resource that fits; None if none fits.

    The search goes downwards from the most: a layout that fits is found soon, but that none fits is known only after
    all layouts have been tried.
    """
    questions = (vary(1 << power) for power in range(_MOST_DOUBLINGS, 0, -1))
    return next(reversed(list(takewhile(fitting_layout, questions))), None)


def with_gpus(question: Question, times: int) -> Question:
    """Return the question for `times` as many GPUs, in full nodes; a step has at least one sequence for each GPU."""
    per_node = question.hardware.gpus_per_node
    gpus = question.gpus * times
    if gpus > per_node:
        gpus = -(-gpus // per_node) * per_node
    return question.with_gpus(gpus)
