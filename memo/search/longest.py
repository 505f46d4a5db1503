"""The longest sequence that fits, and what binds beyond it.

Lengths are multiples of a unit that every layout of the GPUs divides, so a longer sequence needs more of everything
and the longest one is found by bisection. Long ones are multiples of more, which divide into tiles of any number.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from memo.config.derived import DEFAULT_TILES, SWEPT_TOKENS
from memo.config.flag import LARGEST
from memo.errors import ConfigError
from memo.estimate.verdict import Verdict
from memo.search.candidates import FULL, GRID, SELECTIVE, Layout, Strategy, exchanges, grids
from memo.search.oversized import costs_of, frugal_strategies
from memo.search.question import Question
from memo.search.sizing import may_fit, size
from memo.search.states import fits as can_be_placed
from memo.search.states import least_excess, shortage
from memo.search.sweeping import sweeps

_FRUGAL = (GRID[0], FULL, SELECTIVE)
"""What needs least: all else lies between, in GPU memory and in host memory."""

_STEPS = 64
"""In which the longest sequence is found between a power of two times the unit and twice as much."""


@dataclass(frozen=True)
class Longest:
    """The answer.

    Attributes:
        seq_len: tokens; 0 where not even one unit fits.
        unit: lengths are multiples of it.
        limit: why the next length does not fit: the layout that comes nearest, and the memory it lacks; or what
            the model forbids.
    """

    seq_len: int
    unit: int
    limit: str


class Speed(Protocol):
    def __call__(self, question: Question, least_tgs: float = 0.0) -> float:
        """Tokens per GPU and second of the fastest layout that fits; 0 where none does.

        Where that is less than `least_tgs`, the answer is quicker, and may be 0 as well.
        """


def longest(question: Question, speed: Speed | None = None, min_tgs: float = 0.0) -> Longest:
    """The longest sequence for which some layout fits, at the question's global batch size.

    States are shared out or go to host memory where the question always asks for that, or where not even the shortest
    sequence fits without.

    Args:
        speed: where a layout must also train at `min_tgs` tokens per GPU and second.
    """
    unit = length_unit(question.gpus)
    ways = [question.place_states == "always"]
    ways += [True] if question.place_states == "needed" else []
    found = Longest(0, unit, "")
    for places in ways:
        found = _longest(question, unit, places)
        if found.seq_len:
            break
    return found if speed is None else _fast_enough(question, unit, found, speed, min_tgs)


def _fast_enough(question: Question, unit: int, found: Longest, speed: Speed, min_tgs: float) -> Longest:
    """The longest sequence up to the one that fits whose fastest layout trains at `min_tgs`."""
    slow: list[int] = []

    def is_fast(units: int) -> bool:
        is_enough = speed(question.at_length(units * unit), min_tgs) >= min_tgs
        slow.extend([] if is_enough else [units])
        return is_enough

    high = found.seq_len // unit
    if not high or is_fast(high):
        return found
    # From above: very short sequences are slow as well.
    low = _below(high)
    while low and not is_fast(low):
        low, high = _below(low), low
    step = max(1, low // _STEPS)
    while high - low > step and low:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if is_fast(middle) else (low, middle)
    what, lengths = (f"{high * unit:,} tokens train", [high]) if low else ("all lengths train", slow)
    most = max(speed(question.at_length(units * unit)) for units in lengths)
    limit = f"{what} at no more than {most:,.0f} tokens per GPU and second, fewer than --min-tgs {min_tgs:g}"
    return Longest(low * unit, step * unit, limit)


def _below(units: int) -> int:
    """The power of two below a number; 0 below 1."""
    return 1 << (units - 1).bit_length() - 1 if units > 1 else 0


def _longest(question: Question, unit: int, places: bool) -> Longest:
    last: list[Layout] = []  # where the last length that fits did

    def does_fit(units: int) -> bool:
        at = _at(question, units * unit)
        if at is None:
            return False
        layouts = filter(partial(may_fit, at), chain(last, single_layouts(at)))
        found = next((pair for pair in frugal(at, layouts, places) if _holds(at, *pair, places)), None)
        last[:] = last if found is None else [found[0]]
        return found is not None

    if not does_fit(1):
        return Longest(0, unit, _limit(question, unit, places))
    low, high = 1, 2
    while high * unit <= LARGEST and does_fit(high):
        low, high = high, 2 * high
    step = max(1, low // _STEPS)
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if does_fit(middle) else (low, middle)
    return Longest(low * unit, step * unit, _limit(question, (low + step) * unit, places))


def fits(question: Question) -> bool:
    """Whether some layout fits at the question's length; states may move, unless the question forbids that."""
    places = question.place_states != "never"
    layouts = filter(partial(may_fit, question), single_layouts(question))
    return any(_holds(question, *pair, places) for pair in frugal(question, layouts, places))


def shortage_of(question: Question) -> str:
    """Of which memory the layout that comes nearest to fitting at the question's length lacks how much.

    Raises ConfigError where the GPUs cannot be laid out.
    """
    return _limit(question, question.seq_len, question.place_states != "never")


def _holds(question: Question, layout: Layout, strategy: Strategy, places: bool) -> bool:
    if places:
        return can_be_placed(costs_of(question, layout, strategy))
    return size(question, layout, strategy).verdict == Verdict.FITS


def length_unit(gpus: int) -> int:
    """A multiple of 2 cp tp DEFAULT_TILES for any tp x cp that divides the GPUs, and of 1,024."""
    return math.lcm(1024, 2 * gpus * DEFAULT_TILES)


def _at(question: Question, seq_len: int) -> Question | None:
    """None where the model has no positions for so many tokens."""
    model = question.model.sizes
    table = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and table is not None and seq_len > table:
        return None
    return question.at_length(seq_len)


def single_layouts(question: Question) -> Iterator[Layout]:
    """Micro-batches of 1, and stages of one chunk: several hold more."""
    return (layout for grid, why in grids(question) if not why for layout in exchanges(question, grid))


def frugal(question: Question, layouts: Iterable[Layout], places: bool) -> Iterator[tuple[Layout, Strategy]]:
    """Each layout with the strategies that need least."""
    for layout in layouts:
        swept = sweeps(question, layout, 0.0, SWEPT_TOKENS[-1:])  # the smallest take least
        ways = frugal_strategies(question, layout) if places else chain(swept, _FRUGAL)
        yield from ((layout, strategy) for strategy in ways)


def _limit(question: Question, seq_len: int, places: bool) -> str:
    at = _at(question, seq_len)
    if at is None:
        return f"the model's table of {question.model.sizes.max_position_embeddings:,} positions"
    pairs = list(frugal(at, single_layouts(at), places))
    if not pairs:
        raise ConfigError(f"--gpus {question.gpus} cannot be laid out: {next(why for _, why in grids(at) if why)}")
    if places:
        costs = {pair: costs_of(at, *pair) for pair in pairs}
        layout, strategy = min(pairs, key=lambda pair: least_excess(costs[pair]))
        why = shortage(costs[layout, strategy])
    else:
        layout, strategy = min(pairs, key=lambda pair: size(at, *pair).excess)
        why = size(at, layout, strategy, exactly=True).shortage(at)
    return f"{why} with {seq_len:,} tokens under {layout}, {strategy}"
