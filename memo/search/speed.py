"""How fast a question's best layout trains, for whoever asks for --min-tgs."""

import math

from memo.search.question import Question
from memo.search.ranking import search

_ROUNDING = 1e-9
"""A speed that is exactly reached counts."""


def speed(question: Question, least_tgs: float = 0.0) -> float:
    """Tokens per GPU and second of the fastest layout that fits; 0 where none does.

    Where that is less than `least_tgs`, the answer is quicker, and may be 0 as well.
    """
    below_s = (1.0 + _ROUNDING) * question.tokens / question.gpus / least_tgs if least_tgs else math.inf
    best = search(question, top=1, below_s=below_s).best
    return 0.0 if best is None else best.step.tgs


def too_slow(what: str, tgs: float, min_tgs: float) -> str:
    return f"{what} train at no more than {tgs:,.0f} tokens per GPU and second, fewer than --min-tgs {min_tgs:g}"
