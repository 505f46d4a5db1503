"""Tensors that come and go, by name and bytes, and the moment at which they take most."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice


class Block:
    """One tensor while it lives, or several that come and go together: `parts` are then their bytes by name."""

    __slots__ = ("name", "num_bytes", "parts")

    def __init__(self, name: str, num_bytes: int, parts: Mapping[str, int] | None = None) -> None:
        self.name, self.num_bytes, self.parts = name, num_bytes, parts


@dataclass(frozen=True)
class Moment:
    """What lives together.

    Attributes:
        at: where in the step, such as "layer backward".
        num_bytes: of all of it.
    """

    at: str
    num_bytes: int
    _events: Sequence[tuple[Block, int]] = field(repr=False)
    _num_events: int

    @cached_property
    def alive(self) -> dict[str, int]:
        """Bytes by name; equal names add up. Put together when it is asked for: most moments are only weighed."""
        alive: Counter[str] = Counter()
        for block, sign in islice(self._events, self._num_events):
            for name, num_bytes in ((block.name, block.num_bytes),) if block.parts is None else block.parts.items():
                alive[name] += sign * num_bytes
        return {name: num_bytes for name, num_bytes in alive.items() if num_bytes}


@dataclass
class Ledger:
    """Requests of a piece of code, in its order. Bytes are what an allocator counts: asked for, nothing rounded.

    Attributes:
        never: names of what is only asked for on another device.
    """

    at: str = ""
    never: frozenset[str] = frozenset()
    live_bytes: int = 0
    peak_bytes: int = 0
    _events: list[tuple[Block, int]] = field(default_factory=list)
    _peak_event: int = 0
    _peak_at: str = ""

    def make(self, name: str, num_bytes: int) -> Block:
        """What is empty is no event."""
        block = Block(name, 0 if name in self.never else num_bytes)
        return self._add(block) if block.num_bytes else block

    def make_all(self, parts: Mapping[str, int]) -> Block:
        """As one, which is freed as one."""
        return self._add(Block("", sum(parts.values()), parts))

    def _add(self, block: Block) -> Block:
        self._events.append((block, 1))
        self.live_bytes += block.num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_event, self._peak_at = self.live_bytes, len(self._events), self.at
        return block

    def restart(self) -> None:
        """The peak from here on."""
        self.peak_bytes, self._peak_event, self._peak_at = self.live_bytes, len(self._events), self.at

    @property
    def now(self) -> Moment:
        return Moment(self.at, self.live_bytes, self._events, len(self._events))

    def free(self, *blocks: Block | None) -> None:
        """None and what is empty do not count."""
        for block in blocks:
            if block is not None and (block.num_bytes or block.parts):
                self._events.append((block, -1))
                self.live_bytes -= block.num_bytes

    def pulse(self, *sizes: tuple[str, int]) -> None:
        """Made one after the other and freed the other way round, as the scratch memory of a kernel is."""
        blocks = [self.make(name, num_bytes) for name, num_bytes in sizes if num_bytes and name not in self.never]
        self.free(*reversed(blocks))

    @property
    def peak(self) -> Moment:
        return Moment(self._peak_at, self.peak_bytes, self._events, self._peak_event)
