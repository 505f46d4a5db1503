"""Re-checks a solution and names what is wrong with it; shares no code with the solvers."""

from bisect import bisect_left, insort
from collections.abc import Mapping

from memo.errors import PlanError
from memo.planner.memory.dsa import Block, BlockId, Problem, Solution


class LiveBlocks:
    """The blocks alive at one moment, by address; as no two overlap, a new one can only overlap its neighbours."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, str]] = []

    def add(self, name: str, begin: int, num_bytes: int) -> None:
        """Raises PlanError, naming both blocks, if a live block overlaps [begin, begin + num_bytes)."""
        at = bisect_left(self._blocks, (begin,))
        for other_begin, other_end, other in self._blocks[max(0, at - 1) : at + 1]:
            if begin < other_end and other_begin < begin + num_bytes:
                raise PlanError(
                    f"{name} lies at {begin} to {begin + num_bytes} while {other} lives at {other_begin} to "
                    f"{other_end}: solve again"
                )
        insort(self._blocks, (begin, begin + num_bytes, name))

    def remove(self, begin: int) -> None:
        del self._blocks[bisect_left(self._blocks, (begin,))]


def validate(problem: Problem, solution: Solution) -> None:
    """Raises PlanError for blocks that are missing, unknown, unaligned, below 0, above the capacity or overlapping, and
    for a wrong peak, bound or proof."""
    offsets = solution.offsets
    if unknown := offsets.keys() - {block.id for block in problem.blocks}:
        raise PlanError(f"block {min(unknown, key=str)} has an offset, but the problem does not know it")
    for block in problem.blocks:
        _check_address(problem, block, offsets)
    live = LiveBlocks()
    moments = [(block.upper, 0, block) for block in problem.blocks] + [(b.lower, 1, b) for b in problem.blocks]
    for _, begins, block in sorted(moments, key=lambda moment: moment[:2]):  # at one time, ends come first
        if begins:
            live.add(f"block {block.id}", offsets[block.id], problem.aligned_bytes(block))
        else:
            live.remove(offsets[block.id])
    ends = [offsets[block.id] + problem.aligned_bytes(block) for block in problem.blocks]
    if solution.peak_bytes != max(ends, default=0):
        raise PlanError(f"peak_bytes is {solution.peak_bytes}, but the highest block ends at {max(ends, default=0)}")
    if solution.lower_bound_bytes > solution.peak_bytes:
        raise PlanError(
            f"lower_bound_bytes is {solution.lower_bound_bytes}, but the peak of {solution.peak_bytes} is lower"
        )
    if (solution.proof == "optimal") != (solution.peak_bytes == solution.lower_bound_bytes):
        raise PlanError(
            f"proof is {solution.proof!r} with a peak of {solution.peak_bytes} bytes and a bound of "
            f"{solution.lower_bound_bytes}"
        )


def _check_address(problem: Problem, block: Block, offsets: Mapping[BlockId, int]) -> None:
    offset = offsets.get(block.id)
    if offset is None:
        raise PlanError(f"block {block.id} has no offset")
    if offset < 0:
        raise PlanError(f"block {block.id} lies at {offset}, below 0")
    if offset % problem.alignment_bytes:
        raise PlanError(f"block {block.id} lies at {offset}, not a multiple of {problem.alignment_bytes}")
    end = offset + problem.aligned_bytes(block)
    if problem.capacity_bytes is not None and end > problem.capacity_bytes:
        raise PlanError(f"block {block.id} ends at {end}, above the capacity of {problem.capacity_bytes} bytes")
