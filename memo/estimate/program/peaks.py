"""The peak of a step without a walk for each candidate: one walk for each course uses symbols instead of bytes.

    bytes that live at one moment = 2 x a layer's kept + 3 x hidden states + 1 x the transient of a backward + ...

The course of a step alone decides which tensors live together; the candidate decides how many bytes they have. So
memo.estimate.program.step walks with a power of a large base in the place of each number of bytes. The live bytes at a
moment are then a sum whose digits count how often each tensor lives. A moment is dropped if another moment has at least
as much of every tensor. The peak of a candidate is the largest remaining moment, evaluated with the candidate's bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from operator import itemgetter, mul

from memo.estimate.program.course import Course
from memo.estimate.program.ledger import Block, Ledger, Pass, Snapshot
from memo.estimate.program.passes import EndPasses, LayerPasses
from memo.estimate.program.reductions import Gradients, Reduced
from memo.estimate.program.step import Step

_Moment = tuple[Callable[[list[int]], tuple[int, ...]], tuple[int, ...]]
_NONE = Reduced(0, 0, 0)
_DIGIT_BITS = 48
"""Bits of one digit of the base. No tensor lives 2^47 times at once, so the highest bit of a digit tells whether a
subtraction borrowed from it."""


def peak_bytes(course: Course, kinds: Sequence[LayerPasses], ends: EndPasses, gradients: Gradients) -> int:
    """Return the peak bytes of a step on GPUs, without tensors that live during all of it; arguments as in `Step`."""
    numbers = _numbers(course, kinds, ends, gradients)
    return max(sum(map(mul, counts, of_numbers(numbers))) for of_numbers, counts in _worst_moments(course))


def _numbers(course: Course, kinds: Sequence[LayerPasses], ends: EndPasses, gradients: Gradients) -> list[int]:
    """Return all bytes that a walk reads from the arguments, in the order of the symbols of `_symbolic`."""
    found = [kinds[0].hidden_bytes, *ends.numbers, gradients.norm, gradients.sent]
    for module in (gradients.embedding or _NONE, gradients.head or _NONE):
        found += module.shards, module.squares
    num_passes = 4 if course.has_tails else 3
    for passes, layer in zip(kinds, gradients.layers, strict=True):
        found += passes.numbers[:num_passes]
        module = layer or _NONE
        found += module.shards, module.squares
    return found


def _symbolic(course: Course) -> tuple[list[LayerPasses], EndPasses, Gradients]:
    """Return the arguments of a walk with a power of the base in the place of each number of `_numbers`."""
    powers = (1 << _DIGIT_BITS * place for place in count())

    def symbol() -> int:
        return next(powers)

    def run(late: bool = False) -> Pass:
        return Pass(_snapshot(0), _snapshot(symbol()), _snapshot(symbol()) if late else None, _snapshot(0))

    def reduced(is_trained: bool) -> Reduced | None:
        module = Reduced(symbol(), 0, symbol())  # NCCL asks torch's allocator for nothing
        return module if is_trained else None

    hidden, rope_bytes, of_head = symbol(), symbol(), symbol()
    rope, embedding, embedding_backward, held_backward, loss_backward = *(run() for _ in range(4)), run(late=True)
    ends = EndPasses(rope, embedding, loss_backward, embedding_backward, held_backward, rope_bytes, of_head)
    norm, sent = symbol(), symbol()
    *of_kinds, embedding_trained, head_trained = course.trained
    of_ends = reduced(embedding_trained), reduced(head_trained)
    kinds, layers = [], []
    for is_trained in of_kinds:
        between = _snapshot(symbol() + (hidden if course.keeps_input else 0))
        kinds.append(LayerPasses(run(), run(course.has_tails), between, course.keeps_input, course.in_place, hidden))
        layers.append(reduced(is_trained))
    return kinds, ends, Gradients(tuple(layers), *of_ends, norm, sent, 0)


def _snapshot(num_bytes: int) -> Snapshot:
    return Snapshot("", num_bytes, (), 0)


class _Symbols(Ledger):
    """Collects the live symbols after each request: sums of symbols have no order, so there is no single peak."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def _add(self, block: Block) -> Block:
        self.live_bytes += block.num_bytes
        self.seen.add(self.live_bytes)
        return block

    def free(self, *blocks: Block | None) -> None:
        for block in blocks:
            self.live_bytes -= 0 if block is None else block.num_bytes

    def reach(self, num_bytes: int, parts: Callable[[], Mapping[str, int]], at: str = "") -> None:
        self.seen.add(self.live_bytes + num_bytes)


@lru_cache(maxsize=4096)
def _worst_moments(course: Course) -> list[_Moment]:
    """Return, for each moment that may be the peak, a getter of its numbers, and how often each number counts."""
    ledger = _Symbols()
    kinds, ends, gradients = _symbolic(course)
    Step(ledger, course, kinds, ends, gradients, {}).run()
    places = range(len(_numbers(course, kinds, ends, gradients)))
    highest = sum(1 << _DIGIT_BITS * place + _DIGIT_BITS - 1 for place in places)
    worst: list[int] = []
    for moment in sorted(ledger.seen, key=_digit_sum, reverse=True):  # so that no later moment has more of everything
        if not any(highest & (highest + other - moment) == highest for other in worst):
            worst.append(moment)
    found: list[_Moment] = []
    for moment in worst:
        digits = [moment >> _DIGIT_BITS * place & (1 << _DIGIT_BITS) - 1 for place in places]
        counts = {place: digit for place, digit in enumerate(digits) if digit}
        found.append((itemgetter(0, *counts), (0, *counts.values())))  # with 0 first, itemgetter returns a tuple
    return found


def _digit_sum(moment: int) -> int:
    """A number modulo its base minus one is the sum of its digits, where that is smaller than the base minus one."""
    return moment % ((1 << _DIGIT_BITS) - 1)
