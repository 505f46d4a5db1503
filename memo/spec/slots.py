"""Where a layer's skeletal activations lie in a rounding buffer: the layout, and the bytes that follow from it.

    slot (bytes)   | always: input, attention_out, lse | token-wise: first tiles of residual, fc1, qkv | rest of qkv |
                   |<------------- moved: one contiguous prefix, one copy each way ------------------->|
                   0                                                                          moved_bytes   slot_bytes

Attention needs q, k and v of all tokens at once, so qkv has room for every tile. It comes last, so that the moved bytes
are a prefix of the slot. When no tile of qkv moves, all of it is recomputed before use, and one workspace that all
layers share replaces the room in each slot.

Where layers are swept (memo.spec.sweep), "layer" here means one section of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from memo.config import ModelConfig, RunConfig
from memo.config.derived import rank_length, resolved_dtype, resolved_offload_tiles, resolved_sections
from memo.config.memory import OffloadPolicy
from memo.config.training import Dtype
from memo.spec.skeleton import SkeletalTensor, SlotDims, local_size, moves_in_part, skeletal_tensors
from memo.units import DTYPE_BYTES

SLOT_ALIGNMENT_BYTES = 512

NEEDS_FULL_ROOM = "qkv"
"""The group that needs room for all of its tiles as soon as one of them moves."""


Moved = float | Mapping[str, int]
"""How much moves: one share of the tokens of every group, rounded down to tiles, or the number of tiles of each
group."""

_GRID_TOLERANCE = 1e-9
"""In tiles: 0.3 x 10 is 2.9999999999999996."""


@dataclass(frozen=True)
class Place:
    """The place of one tensor in a slot or in the workspace; the first `saved_rows` of its rows are moved.

    Attributes:
        shape: rows, sequences, width on this rank.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: Dtype
    offset_bytes: int
    saved_rows: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class SlotLayout:
    """Places of all tensors that are kept, and the sizes that follow.

    Attributes:
        places: {name: place} in the slot.
        workspace: the place of qkv when none of it moves, at offset 0 of the workspace that all slots share.
        moved_bytes: bytes of the prefix that is copied, which is one host record.
    """

    places: dict[str, Place]
    workspace: Place | None
    moved_bytes: int
    slot_bytes: int

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.num_bytes if self.workspace is not None else 0

    def buffer_bytes(self, num_slots: int) -> int:
        """Device memory of all rounding buffers."""
        return num_slots * self.slot_bytes + self.workspace_bytes

    def saved_rows(self, name: str) -> int:
        """Rows of a tensor that survive between forward and backward."""
        return self.places[name].saved_rows if name in self.places else 0


def slot_dims(config: RunConfig) -> SlotDims:
    """The dims of a rank of this run; the dtype is the device's default if the configuration names none."""
    sections = resolved_sections(config)
    tiles = resolved_offload_tiles(config) // sections
    return SlotDims(
        tokens=rank_length(config) // sections,
        batch=config.training.micro_batch_size,
        tp=config.parallel.tp,
        tiles=tiles,
        dtype=resolved_dtype(config.training, config.hardware.device),
        carried=tiles if config.memory.sweeps else 0,
        cp=config.parallel.cp,
    )


def whole_tiles(share: float, tiles: int) -> int:
    """Tiles of a share of the tokens, rounded down."""
    return int(share * tiles + _GRID_TOLERANCE)


def slot_layout(config: RunConfig, moved: Moved) -> SlotLayout:
    """The layout of one layer in a rounding buffer of one rank when `moved` moves."""
    dims = slot_dims(config)
    if not isinstance(moved, Mapping):
        moved = dict.fromkeys(nothing_moved(config.model, config.memory.offload_policy), whole_tiles(moved, dims.tiles))
    return _layout_of(config.model, dims, frozenset(moved.items()))


@lru_cache(maxsize=1024)
def _layout_of(model: ModelConfig, dims: SlotDims, moved: frozenset[tuple[str, int]]) -> SlotLayout:
    """Cached, because a search asks for the same few layouts of slots again and again."""
    return plan_slot(skeletal_tensors(model), dims, dict(moved))


def own_layout(kind: ModelConfig, dims: SlotDims, slots: SlotLayout) -> SlotLayout:
    """Places of one kind of layer in slots that have room for all kinds."""
    widths = {tensor.name: local_size(tensor, dims)[1] for tensor in skeletal_tensors(kind)}
    places = {
        name: replace(place, shape=(*place.shape[:2], widths[name]))
        for name, place in (
            slots.places | ({} if slots.workspace is None else {NEEDS_FULL_ROOM: slots.workspace})
        ).items()
        if name in widths
    }
    workspace = None if slots.workspace is None else places.pop(NEEDS_FULL_ROOM)
    return replace(slots, places=places, workspace=workspace)


def nothing_moved(model: ModelConfig, policy: OffloadPolicy) -> dict[str, int]:
    """The number of tiles of each group, 0, where only tensors move that always do."""
    return {tensor.group: 0 for tensor in skeletal_tensors(model) if moves_in_part(tensor, policy)}


@dataclass(frozen=True)
class Resident:
    """Tensors that a layer keeps on the device without a swap plan.

    Attributes:
        layout: places of the tensors that the backward finds, with all their tokens.
        made: {name: place} of the tensors that the forward fills, without the input.
        dropped: names in `made` that are freed after the forward and recomputed before the backward.
    """

    layout: SlotLayout
    made: dict[str, Place]
    dropped: frozenset[str]


def resident(config: RunConfig, kind: ModelConfig) -> Resident:
    """The tensors that a layer of one kind of this run keeps under --recompute-granularity. They have rows of all
    tokens, also where --offload-granularity tile would sweep the layer if anything had to move."""
    skeleton, granularity = skeletal_tensors(kind), config.memory.recompute_granularity
    dims = replace(slot_dims(config), tokens=rank_length(config), tiles=1, carried=0)
    whole = {} if granularity == "full" else {tensor.group: 1 for tensor in skeleton if tensor.kind == "token_wise"}
    layout = _layout_of(kind, dims, frozenset(whole.items()))  # all rows or none
    made = {**layout.places, **({} if layout.workspace is None else {NEEDS_FULL_ROOM: layout.workspace})}
    del made["input"]
    of_attention = frozenset(name for name in ("attention_out", "lse") if name in made)
    dropped = {"none": frozenset[str](), "selective": of_attention, "full": of_attention | {NEEDS_FULL_ROOM}}[
        granularity
    ]
    return Resident(layout, made, dropped)


def plan_slot(skeleton: tuple[SkeletalTensor, ...], dims: SlotDims, tiles_moved: Mapping[str, int]) -> SlotLayout:
    """Lay out one layer. `tiles_moved` gives, by group, how many of the T tiles move (0 for absent groups)."""
    always = [t for t in skeleton if t.kind == "always"]
    partial = [t for t in skeleton if t.kind != "always" and tiles_moved.get(t.group, 0) > 0]
    partial.sort(key=lambda t: t.group == NEEDS_FULL_ROOM)  # qkv last, the others in order of execution
    places: dict[str, Place] = {}
    end = moved = 0
    for tensor in [*always, *partial]:
        rows, width, dtype = local_size(tensor, dims)
        saved = rows if tensor.kind == "always" else rows * tiles_moved[tensor.group] // dims.tiles
        kept = rows if tensor.group == NEEDS_FULL_ROOM else saved
        start = -(-end // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        row_bytes = dims.batch * width * DTYPE_BYTES[dtype]
        places[tensor.name] = Place(tensor.name, (kept, dims.batch, width), dtype, start, saved)
        moved, end = start + saved * row_bytes, start + kept * row_bytes
    workspace = None
    if tiles_moved.get(NEEDS_FULL_ROOM, 0) == 0:
        tensor = next(t for t in skeleton if t.group == NEEDS_FULL_ROOM)
        rows, width, dtype = local_size(tensor, dims)
        workspace = Place(tensor.name, (rows, dims.batch, width), dtype, 0, 0)
    return SlotLayout(places, workspace, moved, end)
