"""The best plan at growing sequence lengths: what `memo plan --plot` draws."""

from collections.abc import Iterator

from memo.config.derived import DEFAULT_TILES
from memo.search.longest import length_unit, longest
from memo.search.question import Question
from memo.search.ranking import Plan, search

SHORTEST = 8192


def plans_by_length(question: Question) -> list[Plan]:
    """A plan for each length from 8K tokens on, doubling, and for the longest that fits; each has a best choice."""
    found = longest(question)
    unit = length_unit(question.gpus, DEFAULT_TILES)
    plans = (search(question.at_length(length), top=1) for length in _lengths(unit, found.seq_len))
    return [plan for plan in plans if plan.best is not None]


def _lengths(unit: int, last: int) -> Iterator[int]:
    length = max(unit, SHORTEST // unit * unit)
    while length < last:
        yield length
        length *= 2
    if last:
        yield last
