"""Keys and values of the layer that runs, while layers are swept section by section (memo.spec.sweep).

The store is divided into parts, one for the tokens of each section. A part is used from its section of a forward to the
end of the layer, and from the beginning of a layer's backward to the end of its section:

    compute   F1: s0  s1  s2  s3           B1: s3  s2  s1  s0
    part 0        |==============|           |==============|
    part 3                    |==|           |==|            -> B0's part 3 is fetched as soon as this one is free

So every part is a slot of its own, and all of them move under the same swap plan, in which a slot holds a layer. A part
leaves the device as soon as its section of a forward has ended, because later sections only read it. The next layer's
forward waits for a part only until that part has been copied. Parts on a disk share a few staging buffers.

Where context-parallel ranks gather keys and values, parts hold those of this rank alone. The gathered ones never
move: a backward gathers them again.
"""

import torch
from torch import Tensor

from memo.executor.host_budget import HostBudget
from memo.executor.host_records import HostRecords
from memo.executor.streams import StreamBackend
from memo.executor.swapper import Swapper
from memo.parallel.dtypes import torch_dtype
from memo.planner.disk_plan import DiskPlan
from memo.planner.swap import SwapPlan
from memo.spec.sweep import KeyValueLayout


class KeyValues:
    """Keys and values of one layer, and the sums of their gradients: [s, b, 2 k, d], the keys of a token come first.

    Rows that callers name are those of this rank's tokens, s / cp of them, in whole tiles.

    Attributes:
        moved: this rank's share, which lies in host memory between forward and backward: [s / cp, b, 2 k, d] if those
            of other ranks are gathered, else everything.
    """

    def __init__(self, layout: KeyValueLayout, device: torch.device) -> None:
        s, b, width = layout.shape
        heads = (s, b, width // layout.head_dim, layout.head_dim)
        own = (s // layout.cp, *heads[1:])
        self._both = torch.empty(heads, dtype=torch_dtype(layout.dtype), device=device)
        self.sums = torch.empty(heads, dtype=torch_dtype(layout.sum_dtype), device=device)
        self._own = torch.empty(own, dtype=self._both.dtype, device=device) if layout.gathers else None
        self._cp = layout.cp

    @property
    def moved(self) -> Tensor:
        return self._both if self._own is None else self._own

    @property
    def tensors(self) -> list[Tensor]:
        return [self._both, self.sums, *([] if self._own is None else [self._own])]

    def own(self, rows: slice) -> Tensor | None:
        """Of this rank's tokens alone; None if nothing is gathered."""
        return None if self._own is None else self._own[rows]

    def before(self, row: int) -> Tensor:
        """Of all tokens up to the end of the tile that ends with this rank's row `row`."""
        return self._both[: row * self._cp]

    def sums_before(self, row: int) -> Tensor:
        """As `before`, the sums of the gradients."""
        return self.sums[: row * self._cp]


class KeyValueSwapper:
    """Moves keys and values under a swap plan with one slot.

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
        """Takes host records from the budget `host` (None: no limit), and those of `disk`, in each part, from its disk.

        Raises HostMemoryError or DiskError if it is too small.
        """
        self.sections, device, size = layout.sections, values.moved.device, layout.part_bytes
        self.records = HostRecords(plan, size, device, backend, host, disk, "key/value ", layout.sections)
        parts = values.moved.view(layout.sections, -1).view(torch.uint8)
        self.swappers = [
            Swapper(plan, [part], size, self.records, backend, f"key/value part {index} ", index)
            for index, part in enumerate(parts)
        ]

    def begin(self, kind: str, layer: int, section: int) -> None:
        """Before the section of this layer; a backward begins with the last, which reads all keys and values."""
        self.swappers[section].prefetch_what_is_read()
        if kind == "F":
            self.swappers[section].begin(kind, layer)
        elif section == self.sections - 1:
            for swapper in self.swappers:
                swapper.begin(kind, layer)

    def end(self, kind: str, layer: int, section: int) -> None:
        """After the section. A forward reads the keys and values of all sections until its last one has ended."""
        if kind == "B":
            self.swappers[section].end(kind, layer)
            return
        self.swappers[section].end_writes(kind, layer)
        if section == self.sections - 1:
            for swapper in self.swappers:
                swapper.end(kind, layer)

    def next_step(self) -> None:
        """Call it before each training step, also after one that an exception has interrupted."""
        for swapper in self.swappers:
            swapper.reset()
