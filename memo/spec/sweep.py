"""A layer that runs section by section: the sections, and the memory that all of them share.

Under a causal mask the queries of a section need the keys and values of no later section. So a layer can be swept: its
forward goes through the sections in order, and its backward in reverse order, after which the gradients of a section's
keys and values are complete. Rounding buffers then hold a section instead of a layer. For the whole sequence the
device keeps only the keys and values of the layer that runs, and in its backward the sums of their gradients:

    keys and values      [s, b, 2 k d]       parts of as many rows as a section, each of which moves on its own
    sums of gradients    [s, b, 2 k d]       in the wide dtype; never moved
    own keys and values  [s / cp, b, 2 k d]  where those of other ranks are gathered

Over cp every tile is split by itself (memo.parallel.zigzag). Where ranks exchange heads, each rank has all tokens of
k / cp heads. Where they gather keys and values, each rank has all heads, but moves only the keys and values of its own
tokens: a backward gathers them again. So host memory and the link carry them once over cp, at the cost of one more
message for each tile and layer.

Where all layers have a sliding window, the queries of a section need no key from before the window. Then the device
keeps only the last sections, as many as the window and the running section reach into, and sections of keys and values
move through slots of their own:

    section that runs, forward  ->       <- backward
    | 0 | 1 | 2 | 3 | 4 | 5 |    held: 3 sections, [2, 5); 4 runs. Then [3, 6) forward, or [1, 4) backward
            |~~ window ~~|-4-|

Shapes: s tokens of the sequence, b micro-batch, k key/value heads of a rank, d head size.
"""

import math
from dataclasses import dataclass, replace

from memo.config import RunConfig
from memo.config.derived import resolved_dtype, resolved_offload_tiles, resolved_sections, resolved_slot_tiles
from memo.config.training import Dtype
from memo.spec.disk import RecordKind
from memo.spec.skeleton import wide_dtype
from memo.spec.stack import kinds_of
from memo.units import DTYPE_BYTES

KEY_SLOTS = 2
"""Slots through which sections of keys and values move, where the device does not hold the whole sequence."""
BACKWARD_KEYS_PER_QUERY = 8
"""A call of attention's backward returns the gradients of at most this many keys for each query of its tile, beside the
sums to which they are added; for a causal square, as many as it has queries."""


@dataclass(frozen=True)
class Sweep:
    """How layers are swept.

    Attributes:
        tiles: tiles of the sequence; 0: layers are not swept, and slots hold whole layers.
        slot_tiles: tiles that a slot holds.
        again: the number of first layers of a pipeline chunk that recompute attention.
        hidden_on_host: whether the hidden states between layers are in host memory.
    """

    tiles: int = 0
    slot_tiles: int = 1
    recompute_attention_layers: int = 0
    hidden_on_host: bool = False

    def __str__(self) -> str:
        text, again = f"swept in {self.tiles} tiles" if self.tiles else "whole", self.recompute_attention_layers
        text += f", attention recomputed in {again} layers" if again else ""
        return text + (", hidden states in host memory" if self.hidden_on_host else "")


WHOLE = Sweep()


def with_sweep(config: RunConfig, sweep: Sweep) -> RunConfig:
    """`config` with the flags of a sweep; whole layers keep the tiles in which they are computed."""
    memory = replace(
        config.memory,
        offload_granularity="tile" if sweep.tiles else "layer",
        offload_tiles=sweep.tiles or config.memory.offload_tiles,
        offload_slot_tiles=sweep.slot_tiles if sweep.tiles else None,
        recompute_attention_layers=sweep.recompute_attention_layers,
        offload_hidden_states=sweep.hidden_on_host,
    )
    return replace(config, memory=memory)


def sweep_of(config: RunConfig) -> Sweep:
    """The inverse of `with_sweep`."""
    memory = config.memory
    if not memory.sweeps:
        return WHOLE
    return Sweep(
        resolved_offload_tiles(config),
        resolved_slot_tiles(config),
        memory.recompute_attention_layers,
        memory.offload_hidden_states,
    )


@dataclass(frozen=True)
class KeyValueLayout:
    """Sizes of the keys and values of one layer on one rank.

    Attributes:
        shape: s tokens, b sequences, 2 k d: the keys of a token and then its values, of the layers where these are
            widest.
        cp: ranks over which the sequence is split.
        gathers: whether ranks of cp gather the keys and values of all tokens and move those of their own tokens.
        held: sections that are on the device at once; all, unless it `slides`.
    """

    shape: tuple[int, int, int]
    sections: int
    dtype: Dtype
    sum_dtype: Dtype
    cp: int
    gathers: bool
    held: int

    @property
    def slides(self) -> bool:
        """Whether the device holds only the last sections."""
        return self.held < self.sections

    @property
    def part_bytes(self) -> int:
        """Bytes of one section that moves, which is one host record."""
        moved = self._elements // (self.cp if self.gathers else 1)
        return moved // self.sections * DTYPE_BYTES[self.dtype]

    @property
    def device_bytes(self) -> int:
        """Bytes of keys and values, of this rank's own ones if others are gathered, of the sums of gradients, and of
        slots."""
        held = self._elements * self.held // self.sections
        parts = (1 if self.slides else self.sections) * self.gathers + KEY_SLOTS * self.slides
        return held * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.sum_dtype]) + parts * self.part_bytes

    @property
    def slid_elements(self) -> int:
        """Elements of keys and values, or of sums, that are moved to another place on the device before each
        section."""
        return self._elements * (self.held - 1) // self.sections * self.slides

    @property
    def _elements(self) -> int:
        return math.prod(self.shape)


def key_value_layout(config: RunConfig) -> KeyValueLayout:
    """The layout of a rank of this run; the dtype is the device's default if the configuration names none."""
    model, parallel = config.model, config.parallel
    gathers = parallel.cp > 1 and parallel.cp_comm_type == "all_gather"
    widest = max(kind.kv_heads * kind.head_dim for kind in kinds_of(model) if not kind.is_linear)
    width = 2 * widest // (parallel.tp * (1 if gathers else parallel.cp))
    dtype = resolved_dtype(config.training, config.hardware.device)
    shape, sections = (config.data.seq_length, config.training.micro_batch_size, width), resolved_sections(config)
    held = _held_sections(config, sections)
    return KeyValueLayout(shape, sections, dtype, wide_dtype(dtype), parallel.cp, gathers, held)


def _held_sections(config: RunConfig, sections: int) -> int:
    """As many sections as the window reaches into from any token of the last one, if the rest is larger than the slots
    through which sections then move; else all. Layers of several kinds share one store."""
    seq_length = config.data.seq_length
    attending = [kind for kind in kinds_of(config.model) if not kind.is_linear]
    window = max((kind.window(seq_length) or seq_length for kind in attending), default=0)
    held = 1 + math.ceil(window * sections / seq_length)
    return held if held + KEY_SLOTS < sections else sections


def key_value_records(number: int, layout: KeyValueLayout) -> RecordKind:
    """Host records of keys and values: `number` layers, whose parts leave the device one after the other; where the
    store slides, `number` sections."""
    if layout.slides:
        return RecordKind(number, layout.part_bytes)
    return RecordKind(number, layout.sections * layout.part_bytes, parts=layout.sections)
