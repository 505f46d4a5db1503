"""Problems of dynamic storage allocation for tests, and their check by brute force."""

import itertools
import random

from memo.planner.memory.dsa import Block, Problem, Solution


def blocks(*shapes: tuple[int, int, int]) -> tuple[Block, ...]:
    """Return blocks from (lower, upper, num_bytes); ids count from 0."""
    return tuple(Block(index, *shape) for index, shape in enumerate(shapes))


def at_random(chance: random.Random, num_blocks: int, duration: int, max_bytes: int, alignment_bytes: int) -> Problem:
    shapes = []
    for _ in range(num_blocks):
        lower = chance.randrange(duration)
        shapes.append((lower, chance.randint(lower + 1, duration), chance.randint(1, max_bytes)))
    return Problem(blocks(*shapes), alignment_bytes=alignment_bytes)


def cut_rectangle(chance: random.Random, num_blocks: int, duration: int, num_bytes: int) -> Problem:
    """Cut a rectangle of time and memory into blocks: its height is the lowest possible peak."""
    pieces = [(0, duration, 0, num_bytes)]
    while len(pieces) < num_blocks:
        lower, upper, begin, end = pieces.pop(chance.randrange(len(pieces)))
        if chance.random() < 0.5 and upper - lower > 1:
            at = chance.randrange(lower + 1, upper)
            pieces += [(lower, at, begin, end), (at, upper, begin, end)]
        elif end - begin > 1:
            at = chance.randrange(begin + 1, end)
            pieces += [(lower, upper, begin, at), (lower, upper, at, end)]
        else:
            pieces.append((lower, upper, begin, end))
    chance.shuffle(pieces)
    return Problem(blocks(*((lower, upper, end - begin) for lower, upper, begin, end in pieces)))


def most_live_bytes(problem: Problem) -> int:
    """Return the most bytes that live at once, found at the start of every block."""
    return max(
        (
            sum(problem.aligned_bytes(other) for other in problem.blocks if other.lower <= block.lower < other.upper)
            for block in problem.blocks
        ),
        default=0,
    )


def is_valid(problem: Problem, solution: Solution) -> bool:
    """Return whether no two blocks overlap, by a check of every pair."""
    spans = {
        block.id: (solution.offsets[block.id], solution.offsets[block.id] + problem.aligned_bytes(block))
        for block in problem.blocks
    }
    for one, other in itertools.combinations(problem.blocks, 2):
        (begin, end), (other_begin, other_end) = spans[one.id], spans[other.id]
        if one.lower < other.upper and other.lower < one.upper and begin < other_end and other_begin < end:
            return False
    aligned = all(begin >= 0 and begin % problem.alignment_bytes == 0 for begin, _ in spans.values())
    return aligned and solution.peak_bytes == max((end for _, end in spans.values()), default=0)
