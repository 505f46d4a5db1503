"""What would fit where nothing does: shorter sequences, more host memory, moments in bf16, more GPUs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from memo.search.fitting import fits
from memo.search.longest import longest
from memo.search.question import Question

_MOST_DOUBLINGS = 6
"""So much more of one thing is looked at; who needs more has another model in mind."""


def remedies(question: Question) -> list[str]:
    """The least change of each kind that suffices by itself, as the flags that say it; states may move to the host.

    Empty where none of them does.
    """
    found = []
    # States may move at any length, as they may at the question's own: not only where no length fits without.
    moves_states = question.place_states == "needed"
    shorter = longest(replace(question, place_states="always") if moves_states else question).seq_len
    if 0 < shorter < question.seq_len:
        found.append(f"--seq-len {shorter}")
    host_gib = _least(lambda times: fits(_with_host(question, times)))
    if host_gib is not None:
        found.append(f"--host-memory-gib {question.host_memory_gib * host_gib:g}")
    narrow = replace(question, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    if narrow != question and fits(narrow):
        found.append("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")
    gpus = _least(lambda times: fits(_with_gpus(question, times)))
    if gpus is not None:
        found.append(f"--gpus {_with_gpus(question, gpus).gpus}")
    return found


def _least(suffices: Callable[[int], bool]) -> int | None:
    """From the most downwards, because what fits is soon found, but that nothing does only once all has been tried."""
    enough = takewhile(suffices, (1 << n for n in range(_MOST_DOUBLINGS, 0, -1)))
    return min(enough, default=None)


def _with_host(question: Question, times: int) -> Question:
    return replace(question, host_memory_gib=question.host_memory_gib * times)


def _with_gpus(question: Question, times: int) -> Question:
    """Of full nodes, and no fewer sequences in a step than GPUs that each take one alone."""
    per_node = question.hardware.gpus_per_node
    gpus = question.gpus * times
    if gpus > per_node:
        gpus = -(-gpus // per_node) * per_node
    return question.with_gpus(gpus)
