"""Keys and values of the layer that runs, while layers are swept section by section (memo.spec.sweep).

The store is divided into parts, one for the tokens of each section. A part is used from its section of a forward to the
end of the layer, and from the beginning of a layer's backward to the end of its section:

    compute   F1: s0  s1  s2  s3           B1: s3  s2  s1  s0
    part 0        |==============|           |==============|
    part 3                    |==|           |==|            -> B0's part 3 is fetched as soon as this one is free

So every part is a slot of its own. All parts move under the same swap plan, whose operations are whole layers. The
offload of a part begins as soon as its section of a forward has ended, because later sections only read the part. The
next layer's forward waits for a part only until that part has been copied. Parts on a disk share a few staging buffers.

If context-parallel ranks gather keys and values, parts hold only those of this rank's tokens. Gathered keys and values
never move: a backward gathers them again.

If all layers have a window, the store holds a few sections and slides along the sequence. Sections then move under a
plan of their own, through slots of their own: a backward fetches a section when the store reaches it.
"""

from itertools import pairwise

import torch
from torch import Tensor

from memo.executor.host_budget import HostBudget
from memo.executor.host_records import HostRecords
from memo.executor.section_stream import SectionStream
from memo.executor.streams import StreamBackend
from memo.executor.swapper import Swapper
from memo.parallel.dtypes import torch_dtype
from memo.planner.disk_plan import DiskPlan
from memo.planner.swap import SwapPlan
from memo.spec.slots import Place
from memo.spec.sweep import KeyValueLayout

Heads = tuple[int, int]
"""Numbers 2 k and d: heads of keys and values of a token on this rank, and channels of a head."""


class KeyValues:
    """Keys and values of one layer, and the sums of their gradients: [held s / sections, b, 2 k d], the keys of a token
    come first. Layers with fewer or smaller heads use the first channels of each token.

    Callers name rows of this rank's s / cp tokens, in whole tiles, and the shape of a token's heads, (2 k, d). The
    store holds sections from `first` on, in one piece, so that attention is cut into the same blocks whatever the store
    holds.
    """

    def __init__(self, layout: KeyValueLayout, device: torch.device) -> None:
        s, b, width = layout.shape
        self.layout, self.first = layout, 0
        self._section = s // layout.sections
        whole = (layout.held * self._section, b, width)
        own = ((self._section if layout.slides else s) // layout.cp, b, width)
        self._keys_and_values = torch.empty(whole, dtype=torch_dtype(layout.dtype), device=device)
        self.sums = torch.empty(whole, dtype=torch_dtype(layout.sum_dtype), device=device)
        self._own = torch.empty(own, dtype=self._keys_and_values.dtype, device=device) if layout.gathers else None

    @property
    def moved(self) -> Tensor:
        """Keys and values that move: [s / cp, b, 2 k d] if those of other ranks are gathered, else the whole store.
        If the store slides, use `moved_of`."""
        return self._keys_and_values if self._own is None else self._own

    @property
    def tensors(self) -> list[Tensor]:
        return [self._keys_and_values, self.sums, *([] if self._own is None else [self._own])]

    @property
    def first_token(self) -> int:
        """Position in the sequence of the first token that the store holds."""
        return self.first * self._section

    def moved_of(self, section: int) -> Tensor:
        """Keys and values [c, b, 2 k d] of a section in a store that slides; they go to host memory between forward and
        backward. If those of other ranks are gathered, all sections use the same memory."""
        start = (section - self.first) * self._section
        return self._keys_and_values[start : start + self._section] if self._own is None else self._own

    def begin(self, kind: str, section: int) -> range:
        """Slide to a section before its forward or backward; returns the sections to fetch now."""
        last, held = self.layout.sections - 1, self.layout.held
        before, self.first = self.first, max(0, section + 1 - held)
        if section == (0 if kind == "F" else last):
            return range(last, self.first - 1, -1) if kind == "B" else range(0)
        if self.first == before:
            return range(0)
        for x in (self._keys_and_values,) if kind == "F" else (self._keys_and_values, self.sums):
            parts = x.chunk(held) if kind == "F" else x.chunk(held)[::-1]
            for part, following in pairwise(parts):
                part.copy_(following)
        if kind == "F":
            return range(0)
        self.sums[: self._section].zero_()
        return range(self.first, before)

    def own(self, rows: slice, heads: Heads) -> Tensor | None:
        """Keys and values of this rank's tokens alone, for these rows; None if nothing is gathered."""
        if self._own is None:
            return None
        start = rows.start % len(self._own)
        return _as_heads(self._own[start : start + rows.stop - rows.start], heads)

    def before(self, row: int, heads: Heads) -> Tensor:
        """All keys and values in the store, up to the end of the tile that ends with this rank's row `row`."""
        return _as_heads(self._keys_and_values[: self._stop(row)], heads)

    def sums_before(self, row: int, heads: Heads) -> Tensor:
        """Sums of the gradients of the keys and values that `before` returns."""
        return _as_heads(self.sums[: self._stop(row)], heads)

    def _stop(self, row: int) -> int:
        return row * self.layout.cp - self.first_token


def _as_heads(x: Tensor, heads: Heads) -> Tensor:
    """[t, b, at least 2 k d] -> the view [t, b, 2 k, d]."""
    return x[..., : heads[0] * heads[1]].unflatten(-1, heads)


class KeyValueSwapper:
    """Moves keys and values of the whole sequence under a swap plan with one slot.

    A layer calls `begin` before it touches the keys and values of a section, and `end` after its last access.
    """

    def __init__(
        self,
        plan: SwapPlan,
        layout: KeyValueLayout,
        values: KeyValues,
        backend: StreamBackend,
        host: HostBudget | None,
        disk: DiskPlan | None = None,
    ) -> None:
        """Draws host records from the budget `host` (None: no limit); records in `disk` go to the budget's disk. The
        plan of a stage whose layers have no keys and values has no slot.

        Raises HostMemoryError or DiskError if the budget is too small.
        """
        self.sections, device, size = layout.sections, values.moved.device, layout.part_bytes
        self.slots: list[Tensor] = []
        self.records = HostRecords(plan, size, device, backend, host, disk, "key/value ", layout.sections)
        parts = values.moved.view(layout.sections, -1).view(torch.uint8)
        self.swappers = [
            Swapper(plan, [part][: plan.num_slots], size, self.records, backend, f"key/value part {index} ", index)
            for index, part in enumerate(parts)
        ]

    def prefetch_what_is_read(self, section: int) -> None:
        """Call before the section of any layer, even of a layer without keys and values: issues due prefetches."""
        self.swappers[section].prefetch_what_is_read()

    def begin(self, kind: str, layer: int, section: int) -> None:
        """Before a section of this layer; a backward begins with the last section, which reads all keys and values."""
        if kind == "F":
            self.swappers[section].begin(kind, layer)
        elif section == self.sections - 1:
            for swapper in self.swappers:
                swapper.begin(kind, layer)

    def end(self, kind: str, layer: int, section: int) -> None:
        """After a section. A forward reads the keys and values of all sections until its last section has ended."""
        if kind == "B":
            self.swappers[section].end(kind, layer)
            return
        self.swappers[section].end_writes(kind, layer)
        if section == self.sections - 1:
            for swapper in self.swappers:
                swapper.end(kind, layer)

    def take(self, layer: int, section: int) -> None:
        """Do nothing: each part is prefetched to its place in the store."""

    def next_step(self) -> None:
        """Call it before each training step, also after one that an exception has interrupted."""
        for swapper in self.swappers:
            swapper.reset()


class KeyValueStream:
    """Moves keys and values of a store that slides, section by section, under a plan of sections."""

    def __init__(
        self,
        plan: SwapPlan,
        layout: KeyValueLayout,
        values: KeyValues,
        backend: StreamBackend,
        host: HostBudget | None,
        disk: DiskPlan | None = None,
    ) -> None:
        """Arguments and errors as for KeyValueSwapper."""
        section = values.moved_of(0)
        place = Place("key_value", (len(section), *section.shape[1:]), layout.dtype, 0, len(section))
        self.values, self.stream = values, SectionStream(plan, place, "key/value ", backend, section.device, host, disk)
        self.records, self.slots, self.swappers = self.stream.records, self.stream.slots, [self.stream.swapper]

    def prefetch_what_is_read(self, section: int) -> None:
        self.stream.swapper.prefetch_what_is_read()

    def begin(self, kind: str, layer: int, section: int) -> None:
        """Do nothing: in a forward, keys and values are not computed yet; in a backward, `take` reads them."""

    def end(self, kind: str, layer: int, section: int) -> None:
        """After a section: offload the keys and values that a forward has computed."""
        if kind == "F":
            self.stream.put(layer, section, self.values.moved_of(section))

    def take(self, layer: int, section: int) -> None:
        """Copy into the store the keys and values of a section that a backward needs from now on."""
        self.stream.take(layer, section, self.values.moved_of(section))

    def next_step(self) -> None:
        self.stream.swapper.reset()
