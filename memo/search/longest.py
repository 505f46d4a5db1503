"""Finds the longest sequence that fits, the limit beyond it, and remedies if a sequence does not fit.

Lengths are multiples of a unit that every layout of the GPUs divides, so a longer sequence needs more of everything.
Long lengths are multiples of this unit times a power of two, so that many numbers of tiles divide them.
"""

import math
from dataclasses import replace

from memo.config.derived import DEFAULT_TILES
from memo.config.flag import LARGEST
from memo.search.axis import Axis, fitting_layout, least_doubling, shortage_of, too_slow, with_gpus
from memo.search.plan import Longest
from memo.search.question import Question

_STEPS = 64
"""Steps between a power of two times the unit and twice as much, to which the longest sequence is found."""


def longest(question: Question, min_tgs: float | None = None) -> Longest:
    """Return the longest sequence for which some layout fits, at the question's global batch size.

    States are sharded or go to host memory wherever a longer sequence then fits, unless the question forbids it. Some
    layout must train with `min_tgs` tokens per GPU and second.
    """
    unit = length_unit(question.gpus)
    axis = _lengths(question, unit)
    low, high = axis.last_fitting(most=LARGEST // unit)
    if min_tgs is None or not low or axis.fastest(low).tgs >= min_tgs:
        return Longest(low * unit, (high - low) * unit, _limit(question, high * unit))
    slow = low
    low, high = axis.last_fast(slow, min_tgs)
    numbers, what = [high], f"{high * unit:,} tokens"
    if not low:
        numbers, what = [slow, *(1 << power for power in range((slow - 1).bit_length()))], "all lengths"
    tgs = max(axis.fastest(number).tgs for number in numbers)
    return Longest(low * unit, (high - low) * unit, too_slow(what, tgs, min_tgs))


def _lengths(question: Question, unit: int) -> Axis:
    return Axis(
        lambda units: [question.at_length(units * unit)] if _has_positions(question, units * unit) else [], _STEPS
    )


def length_unit(gpus: int) -> int:
    """Return the unit of lengths: a multiple of 1,024, and of 2 cp tp DEFAULT_TILES for any tp x cp that divides the
    GPUs."""
    return math.lcm(1024, 2 * gpus * DEFAULT_TILES)


def _has_positions(question: Question, seq_len: int) -> bool:
    model = question.model.sizes
    table = model.max_position_embeddings
    return model.position_embedding_type != "learned_absolute" or table is None or seq_len <= table


def _limit(question: Question, seq_len: int) -> str:
    if not _has_positions(question, seq_len):
        return f"the model's table of {question.model.sizes.max_position_embeddings:,} positions"
    return shortage_of(question.at_length(seq_len))


def remedies(question: Question) -> list[str]:
    """Return the flags of the least change of each kind that suffices by itself; states may move to host memory.

    Empty if no change of any kind suffices.
    """
    found, unit = [], length_unit(question.gpus)
    shorter = _lengths(question, unit).last_fitting(most=LARGEST // unit)[0] * unit
    if 0 < shorter < question.seq_len:
        found.append(f"--seq-len {shorter}")
    more = least_doubling(lambda times: replace(question, host_memory_gib=times * question.host_memory_gib))
    if more is not None:
        found.append(f"--host-memory-gib {more.host_memory_gib:g}")
    narrow = replace(question, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    unclipped = replace(question, clip_grad=0.0)
    for changed, flags in ((narrow, "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"), (unclipped, "--clip-grad 0")):
        if changed != question and fitting_layout(changed):
            found.append(flags)
    more = least_doubling(lambda times: with_gpus(question, times))
    if more is not None:
        found.append(f"--gpus {more.gpus}")
    return found
