"""The longest sequence that fits, and what binds beyond it.

Lengths are multiples of a unit that every layout of the GPUs divides, so a longer sequence needs more of everything
and the longest one is found by bisection. Long ones are multiples of more, which divide into tiles of any number.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from memo.config.derived import DEFAULT_TILES
from memo.config.flag import LARGEST
from memo.search.fitting import Fitting, bisect, shortage_of, speed, too_slow
from memo.search.plan import Longest
from memo.search.question import PlaceStates, Question

_STEPS = 64
"""In which the longest sequence is found between a power of two times the unit and twice as much."""


def longest(question: Question, min_tgs: float | None = None) -> Longest:
    """The longest sequence for which some layout fits, at the question's global batch size.

    States are shared out or go to host memory where the question always asks for that, or where not even the shortest
    sequence fits without.

    Args:
        min_tgs: tokens per GPU and second at which a layout must also train.
    """
    ways: tuple[PlaceStates, ...] = (question.place_states,)
    if question.place_states == "needed":
        ways = "never", "always"
    for place_states in ways:
        found = _longest(replace(question, place_states=place_states))
        if found.seq_len:
            break
    return found if min_tgs is None else _fast_enough(question, found, min_tgs)


def _longest(question: Question) -> Longest:
    fitting, unit = Fitting(), length_unit(question.gpus)

    def does_fit(units: int) -> bool:
        return _has_positions(question, units * unit) and fitting.fits(question.at_length(units * unit))

    if not does_fit(1):
        return Longest(0, unit, _limit(question, unit))
    low = 1
    while 2 * low * unit <= LARGEST and does_fit(2 * low):
        low *= 2
    low, high = _bisect_in_steps(does_fit, low, 2 * low)
    return Longest(low * unit, (high - low) * unit, _limit(question, high * unit))


def _bisect_in_steps(holds: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
    """Between `low`, a power of two, and `high`, the last multiple of a step that holds, and the next one."""
    step = max(1, low // _STEPS)
    low, high = bisect(lambda steps: holds(steps * step), low // step, high // step)
    return low * step, high * step


def _fast_enough(question: Question, found: Longest, min_tgs: float) -> Longest:
    """The longest sequence up to the one that fits whose fastest layout trains at `min_tgs`."""
    unit, slow = length_unit(question.gpus), []

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
    if low:
        low, high = _bisect_in_steps(is_fast, low, high)
    what, lengths = (f"{high * unit:,} tokens", [high]) if low else ("all lengths", slow)
    tgs = max(speed(question.at_length(units * unit)) for units in lengths)
    return Longest(low * unit, (high - low) * unit, too_slow(what, tgs, min_tgs))


def _below(units: int) -> int:
    """The power of two below a number; 0 below 1."""
    return 1 << (units - 1).bit_length() - 1 if units > 1 else 0


def length_unit(gpus: int) -> int:
    """A multiple of 2 cp tp DEFAULT_TILES for any tp x cp that divides the GPUs, and of 1,024."""
    return math.lcm(1024, 2 * gpus * DEFAULT_TILES)


def _has_positions(question: Question, seq_len: int) -> bool:
    model = question.model.sizes
    table = model.max_position_embeddings
    return model.position_embedding_type == "rope" or table is None or seq_len <= table


def _limit(question: Question, seq_len: int) -> str:
    if not _has_positions(question, seq_len):
        return f"the model's table of {question.model.sizes.max_position_embeddings:,} positions"
    return shortage_of(question.at_length(seq_len))
