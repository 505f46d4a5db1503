"""Requests to an allocator, as names and bytes, and the moment at which live tensors take most bytes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice


class Block:
    """One live tensor, or several with the same lifespan; `parts` then returns their bytes by name."""

    __slots__ = ("name", "num_bytes", "parts")

    def __init__(self, name: str, num_bytes: int, parts: Callable[[], Mapping[str, int]] | None = None) -> None:
        self.name, self.num_bytes, self.parts = name, num_bytes, parts


@dataclass(eq=False)
class Snapshot:
    """The tensors that live at one moment.

    Attributes:
        at: the part of the step, such as "layer backward".
        num_bytes: bytes of all live tensors.
        num_events: number of events of the ledger before this moment.
    """

    at: str
    num_bytes: int
    _events: Sequence[tuple[Block, int]] = field(repr=False)
    num_events: int

    @cached_property
    def alive(self) -> dict[str, int]:
        """Live bytes by name; blocks of equal names add up. Computed on demand: most callers only need `num_bytes`."""
        alive: Counter[str] = Counter()
        for block, sign in islice(self._events, self.num_events):
            for name, num_bytes in ((block.name, block.num_bytes),) if block.parts is None else block.parts().items():
                alive[name] += sign * num_bytes
        return {name: num_bytes for name, num_bytes in alive.items() if num_bytes}


@dataclass(eq=False)
class Pass:
    """One pass, or a piece of one.

    Attributes:
        start: the pass's own tensors before it: its input; in backward, what forward kept and the output's gradient.
        peak: all tensors at the moment at which they take most.
        tail: all tensors at the worst moment after the last weight gradient, when the reduction of the module's
            gradients has started.
        end: the pass's own tensors after it; only with a tail.
    """

    start: Snapshot
    peak: Snapshot
    tail: Snapshot | None = None
    end: Snapshot | None = None

    @cached_property
    def transient(self) -> dict[str, int]:
        """Bytes by name at the peak less the bytes at the start; negative for tensors freed before the peak."""
        return _change(self.start, self.peak)

    @cached_property
    def late(self) -> dict[str, int]:
        """Bytes by name at the worst moment of the tail less the bytes at the end; empty without a tail."""
        return {} if self.tail is None or self.end is None else _change(self.end, self.tail)

    @property
    def transient_bytes(self) -> int:
        return self.peak.num_bytes - self.start.num_bytes

    @property
    def late_bytes(self) -> int:
        return 0 if self.tail is None or self.end is None else self.tail.num_bytes - self.end.num_bytes


def _change(start: Snapshot, moment: Snapshot) -> dict[str, int]:
    change = Counter(moment.alive)
    change.subtract(start.alive)
    return dict(change)


@dataclass(eq=False, slots=True)
class Ledger:
    """Requests of a piece of code, in order. Bytes are the requested ones, without the allocator's rounding.

    Attributes:
        at: the part of the step that runs; it names the moments.
        never: names of requests that do not occur on this device; they are left out.
        live_bytes, peak_bytes: bytes that live now, and the most live bytes since the beginning or `restart`.
    """

    at: str = ""
    never: frozenset[str] = frozenset()
    live_bytes: int = 0
    peak_bytes: int = 0
    _events: list[tuple[Block, int]] = field(default_factory=list)
    _late: list[Block] = field(default_factory=list)
    _tail: Snapshot | None = None
    _peak_event: int = 0
    _peak_at: str = ""

    def make(self, name: str, num_bytes: int) -> Block:
        """Begin the life of a tensor; an empty tensor leaves no event."""
        if not num_bytes or name in self.never:
            return Block(name, 0)
        return self._add(Block(name, num_bytes))

    def make_all(self, num_bytes: int, parts: Callable[[], Mapping[str, int]]) -> Block:
        """Begin the lives of several tensors as one block, freed at once; `parts` returns their bytes by name."""
        return self._add(Block("", num_bytes, parts))

    def reach(self, num_bytes: int, parts: Callable[[], Mapping[str, int]], at: str = "") -> None:
        """Add the worst moment of a piece of code that leaves nothing behind; it is recorded only if it is the peak."""
        if self.live_bytes + num_bytes > self.peak_bytes:
            self.at = at or self.at
            self.free(self.make_all(num_bytes, parts))

    def _add(self, block: Block) -> Block:
        self._events.append((block, 1))
        self.live_bytes += block.num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_event, self._peak_at = self.live_bytes, len(self._events), self.at
        if self._late:
            self._free_late_ones()
        return block

    def copy(self) -> "Ledger":
        """Return a ledger with the same blocks and events, to which other requests may be added."""
        return replace(self, _events=[*self._events], _late=[*self._late])

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes, self._peak_event, self._peak_at = self.live_bytes, len(self._events), self.at

    @property
    def now(self) -> Snapshot:
        """The present moment, after other threads have freed their blocks."""
        self._free_late_ones()
        return Snapshot(self.at, self.live_bytes, self._events, len(self._events))

    def free(self, *blocks: Block | None) -> None:
        """End the lives of blocks; None and empty blocks are ignored."""
        for block in blocks:
            if block is not None and (block.num_bytes or block.parts):
                self._events.append((block, -1))
                self.live_bytes -= block.num_bytes

    def free_late(self, *blocks: Block | None) -> None:
        """End the lives of blocks that another thread frees: they may still live at the next request."""
        self._late += [block for block in blocks if block is not None]

    def _free_late_ones(self) -> None:
        late, self._late = self._late, []
        self.free(*late)

    def mark_reduction_start(self) -> None:
        """Begin the `tail` at the next request; an earlier beginning is forgotten."""
        self._tail = self.now

    @property
    def tail(self) -> Snapshot | None:
        """The moment since `mark_reduction_start` at which live tensors take most; None if it was not called."""
        if self._tail is None:
            return None
        worst, live_bytes = self._tail, self._tail.num_bytes
        for index in range(worst.num_events, len(self._events)):
            block, sign = self._events[index]
            live_bytes += sign * block.num_bytes
            if live_bytes > worst.num_bytes:
                worst = Snapshot(self.at, live_bytes, self._events, index + 1)
        return worst

    def scratch(self, *sizes: tuple[str, int]) -> None:
        """Make blocks one after the other and free them in reverse order, as kernels do with scratch memory."""
        blocks = [
            self._add(Block(name, num_bytes)) for name, num_bytes in sizes if num_bytes and name not in self.never
        ]
        if blocks:
            self.free(*reversed(blocks))

    @property
    def peak(self) -> Snapshot:
        return Snapshot(self._peak_at, self.peak_bytes, self._events, self._peak_event)
