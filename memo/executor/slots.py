"""Where a layer's skeletal activations lie in a rounding buffer.

    slot (bytes)   | always: input, attention_out, lse | token-wise: first tiles of residual, fc1, qkv | rest of qkv |
                   |<------------- moved: one contiguous prefix, one copy each way ------------------->|
                   0                                                                          moved_bytes   slot_bytes

Attention needs q, k and v of all tokens at once, so qkv has room for every tile and comes last: its moved
part is then a prefix of it. When no tile of qkv moves, all of it is rebuilt before use, and one shared
workspace serves every layer instead of room in each slot.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from memo.spec.skeleton import SkeletalTensor

ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class LayerSizes:
    """What decides the shapes on one rank: s tokens after gathering, b sequences, tp, T tiles."""

    tokens: int
    batch: int
    tp: int
    tiles: int
    dtype: torch.dtype

    @property
    def wide_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Place:
    """One tensor in a slot (or in the workspace): the first `saved_rows` of its rows are moved."""

    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    offset_bytes: int
    saved_rows: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """[rows, b, width] in a flat uint8 buffer."""
        raw = memory[self.offset_bytes : self.offset_bytes + self.num_bytes]
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SlotLayout:
    """Places of all tensors that are kept, and the sizes that follow.

    Attributes:
        places: by name, in the slot.
        workspace: qkv when none of it moves; it lies at offset 0 of the shared workspace.
    """

    places: dict[str, Place]
    workspace: Place | None
    moved_bytes: int
    slot_bytes: int

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.num_bytes if self.workspace is not None else 0

    def saved_rows(self, name: str) -> int:
        """Rows of a tensor that survive between forward and backward."""
        return self.places[name].saved_rows if name in self.places else 0


def plan_slot(skeleton: tuple[SkeletalTensor, ...], sizes: LayerSizes, tiles_moved: dict[str, int]) -> SlotLayout:
    """Lay out one layer. `tiles_moved` gives, by group, how many of the T tiles move (0 for absent groups)."""
    always = [t for t in skeleton if t.kind == "always"]
    partial = [t for t in skeleton if t.kind != "always" and tiles_moved.get(t.group, 0) > 0]
    partial.sort(key=lambda t: t.group == "qkv")  # last; the order is otherwise that of execution
    places: dict[str, Place] = {}
    end = 0
    for tensor in [*always, *partial]:
        rows, width, dtype = _local(tensor, sizes)
        saved = rows if tensor.kind == "always" else rows * tiles_moved[tensor.group] // sizes.tiles
        kept = rows if tensor.group == "qkv" else saved
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        places[tensor.name] = Place(tensor.name, (kept, sizes.batch, width), dtype, start, saved)
        end = start + places[tensor.name].num_bytes
    moved = end
    workspace = None
    if "qkv" in places:
        place = places["qkv"]
        moved = place.offset_bytes + place.num_bytes // place.shape[0] * place.saved_rows
    else:
        rows, width, dtype = _local(next(t for t in skeleton if t.group == "qkv"), sizes)
        workspace = Place("qkv", (rows, sizes.batch, width), dtype, 0, 0)
    return SlotLayout(places, workspace, moved, end)


def _local(tensor: SkeletalTensor, sizes: LayerSizes) -> tuple[int, int, torch.dtype]:
    """Rows, width and dtype on this rank."""
    dtype = sizes.wide_dtype if tensor.dtype == "wide" else sizes.dtype
    if tensor.layout == "tokens":
        return sizes.tokens // sizes.tp, tensor.width, dtype
    return sizes.tokens, tensor.width // sizes.tp, dtype
