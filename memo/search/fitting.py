"""Whether any layout fits, which memory the nearest one lacks, how fast the best one is, and bisection over these."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from memo.config.derived import SWEPT_TOKENS
from memo.errors import ConfigError
from memo.estimate.verdict import Verdict
from memo.search.candidates import FULL, GRID, SELECTIVE, Layout, Strategy, exchanges, grids, refusal
from memo.search.oversized import costs_of, frugal_strategies
from memo.search.question import Question
from memo.search.ranking import search
from memo.search.sizing import may_fit, size
from memo.search.states import fits as can_be_placed
from memo.search.states import least_excess, shortage
from memo.search.sweeping import sweeps

_FRUGAL = (GRID[0], FULL, SELECTIVE)
"""What needs least: all else lies between, in GPU memory and in host memory."""
_ROUNDING = 1e-9
"""A speed that is exactly reached counts."""


def single_layouts(question: Question) -> Iterator[Layout]:
    """Micro-batches of 1, and stages of one chunk: several hold more."""
    return (layout for grid, why in grids(question) if not why for layout in exchanges(question, grid))


def _frugal(question: Question, layout: Layout) -> Iterator[Strategy]:
    """The strategies that need least."""
    if question.place_states != "never":
        return frugal_strategies(question, layout)
    return chain(sweeps(question, layout, 0.0, SWEPT_TOKENS[-1:]), _FRUGAL)  # the smallest tiles take least


def _holds(question: Question, layout: Layout, strategy: Strategy) -> bool:
    if question.place_states != "never":
        return can_be_placed(costs_of(question, layout, strategy))
    return size(question, layout, strategy).verdict == Verdict.FITS


def fitting_layout(question: Question, first: Layout | None = None) -> Layout | None:
    """Some layout that fits; states may move, unless the question forbids that. `first` is tried before all others."""
    known = [] if first is None or refusal(question, first) else [first]
    for layout in filter(partial(may_fit, question), chain(known, single_layouts(question))):
        if any(_holds(question, layout, strategy) for strategy in _frugal(question, layout)):
            return layout
    return None


def fits(question: Question) -> bool:
    """Whether some layout fits."""
    return fitting_layout(question) is not None


class Fitting:
    """Whether questions fit that differ little: the layout that held the last one is tried first."""

    def __init__(self) -> None:
        self._last: Layout | None = None

    def fits(self, question: Question) -> bool:
        self._last = fitting_layout(question, self._last)
        return self._last is not None


def nearest(question: Question) -> tuple[str, Layout, Strategy]:
    """What comes nearest to fitting, and of which memory it lacks how much.

    Raises ConfigError where the GPUs cannot be laid out.
    """
    pairs = [(layout, strategy) for layout in single_layouts(question) for strategy in _frugal(question, layout)]
    if not pairs:
        why = next(why for _, why in grids(question) if why)
        raise ConfigError(f"--gpus {question.gpus} cannot be laid out: {why}")
    if question.place_states == "never":
        layout, strategy = min(pairs, key=lambda pair: size(question, *pair).excess)
        return size(question, layout, strategy, exactly=True).shortage(question), layout, strategy
    costs = {pair: costs_of(question, *pair) for pair in pairs}
    layout, strategy = min(pairs, key=lambda pair: least_excess(costs[pair]))
    return shortage(costs[layout, strategy]), layout, strategy


def shortage_of(question: Question) -> str:
    """As `nearest`, in words."""
    why, layout, strategy = nearest(question)
    return f"{why} with {question.seq_len:,} tokens under {layout}, {strategy}"


def bisect(holds: Callable[[int], bool], low: int, high: int, within: int = 1) -> tuple[int, int]:
    """`low`, which holds, and `high`, which does not, moved towards each other until they lie `within` so much."""
    while high - low > within:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def speed(question: Question, least_tgs: float = 0.0) -> float:
    """Tokens per GPU and second of the fastest layout that fits; 0 where none does.

    Where that is less than `least_tgs`, the answer is quicker, and may be 0 as well.
    """
    below_s = (1.0 + _ROUNDING) * question.tokens / question.gpus / least_tgs if least_tgs else math.inf
    best = search(question, top=1, below_s=below_s).best
    return 0.0 if best is None else best.step.tgs


def too_slow(what: str, tgs: float, min_tgs: float) -> str:
    return f"{what} train at no more than {tgs:,.0f} tokens per GPU and second, fewer than --min-tgs {min_tgs:g}"
