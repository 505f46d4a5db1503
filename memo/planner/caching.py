"""A model of PyTorch's caching allocator: the memory that it would reserve for a trace, without a GPU.

On a device, requests are rounded up to 512 bytes and cut out of segments. The default allocator takes segments of 2 MiB
for requests up to 1 MiB, of 20 MiB below 10 MiB, and of the request rounded up to 2 MiB above; with
`expandable_segments:True` each of its two pools is one range of addresses that grows at its end. A request is served by
the smallest free block that is large enough, and free neighbours in one segment merge.

Source: torch/c10/cuda/CUDACachingAllocator.cpp, versions 2.11 to 2.13, with one stream, without max_split_size_mb and
without a garbage collection threshold, on a device that has room for all requests.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from memo.artifacts.memory_trace import Malloc, Trace
from memo.spec.torch_segments import LARGE_SEGMENT_BYTES, SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES
from memo.units import MIB

Mode = Literal["default", "expandable"]

_ROUND = 512
_OWN_SEGMENT = 10 * MIB
_SEGMENT_ROUND = 2 * MIB


@dataclass(frozen=True)
class CachingResult:
    """The result of a simulated run of the allocator.

    Attributes:
        reserved_bytes: the device memory that it holds, none of which it gives back.
        allocated_bytes: peak of the blocks in use, with the sizes to which they were cut.
        device_mallocs: how often it requested memory from the device.
    """

    reserved_bytes: int
    allocated_bytes: int
    device_mallocs: int


def simulate_caching(trace: Trace, mode: Mode = "default", *, iterations: int = 2) -> CachingResult:
    """Run the requests of a trace through the model `iterations` times, as training does."""
    pools = _Allocator(mode == "expandable")
    for _ in range(iterations):
        blocks: dict[int, _Block] = {}
        for event in (event for phase in trace.phases for event in phase.events):
            if isinstance(event, Malloc):
                blocks[event.id] = pools.malloc(event.num_bytes)
            else:
                pools.free(blocks.pop(event.id))
        for block in blocks.values():  # blocks that outlive an iteration are freed before the next one makes them again
            pools.free(block)
    return CachingResult(pools.reserved, pools.peak_allocated, pools.device_mallocs)


class _Block:
    """A piece of a segment, between its neighbours there."""

    __slots__ = ("address", "before", "is_free", "next", "pool", "size")

    def __init__(self, address: int, size: int, pool: "_Pool") -> None:
        self.address, self.size, self.pool = address, size, pool
        self.is_free = False
        self.before: _Block | None = None
        self.next: _Block | None = None


class _Pool:
    """The free blocks for either small or large requests."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.keys: list[tuple[int, int]] = []  # (size, address), sorted
        self.blocks: dict[int, _Block] = {}  # free, by address
        self.end: _Block | None = None  # expandable: the last block of the range

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self.keys, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.address]

    def fitting(self, size: int) -> Iterable[_Block]:
        """Free blocks of at least `size`, the best fit first."""
        for index in range(bisect_left(self.keys, (size, 0)), len(self.keys)):
            yield self.blocks[self.keys[index][1]]


class _Allocator:
    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.small, self.large = _Pool(True), _Pool(False)
        self.reserved = self.allocated = self.peak_allocated = self.device_mallocs = 0
        self._next_address = 0

    def malloc(self, num_bytes: int) -> _Block:
        size = max(_ROUND, -(-num_bytes // _ROUND) * _ROUND)
        pool = self.small if size <= SMALL_REQUEST_BYTES else self.large
        block = self._best_fit(pool, size) or self._from_device(pool, size)
        pool.remove(block)
        self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        self.allocated -= block.size
        pool = block.pool
        if block.before is not None and block.before.is_free:
            pool.remove(block.before)
            block = self._merge(block.before, block)
        if block.next is not None and block.next.is_free:
            pool.remove(block.next)
            block = self._merge(block, block.next)
        pool.add(block)

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        candidates = iter(pool.fitting(size))
        block = next(candidates, None)
        if block is None:
            return None
        # A block that can grow has no size limit, so any other one is a better fit.
        other = next(candidates, None) if block is pool.end else None
        return other or block

    def _from_device(self, pool: _Pool, size: int) -> _Block:
        """A free block of at least `size` in new memory of the device."""
        if self.expandable:
            return self._grown(pool, size)
        if size <= SMALL_REQUEST_BYTES:
            segment = SMALL_SEGMENT_BYTES
        elif size < _OWN_SEGMENT:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        self._reserve(segment)
        block = _Block(self._next_address, segment, pool)
        self._next_address += segment + _SEGMENT_ROUND  # segments never touch
        pool.add(block)
        return block

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """Extend the range of a pool until its last block, if that is free, or else a new one has `size`."""
        end = pool.end
        have = end.size if end is not None and end.is_free else 0
        unit = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        more = -(-(size - have) // unit) * unit
        self._reserve(more)
        if end is not None and end.is_free:
            pool.remove(end)
            end.size += more
            pool.add(end)
            return end
        start = 0 if pool.is_small else 1 << 60
        block = _Block(start if end is None else end.address + end.size, more, pool)
        block.before = end
        if end is not None:
            end.next = block
        pool.end = block
        pool.add(block)
        return block

    def _reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.device_mallocs += 1

    def _split(self, block: _Block, size: int) -> None:
        """Cut off what a request does not need, if it is large enough, and make it free."""
        rest, pool = block.size - size, block.pool
        cuts_anything = pool.is_small or self.expandable
        if rest < _ROUND or not (cuts_anything or rest > SMALL_REQUEST_BYTES):
            return
        remainder = _Block(block.address + size, rest, pool)
        remainder.before, remainder.next = block, block.next
        if block.next is not None:
            block.next.before = remainder
        block.next, block.size = remainder, size
        if pool.end is block:
            pool.end = remainder
        pool.add(remainder)

    def _merge(self, first: _Block, second: _Block) -> _Block:
        """One block from two neighbours; it is in no list of free blocks."""
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.before = first
        if first.pool.end is second:
            first.pool.end = first
        return first
