"""The problem of how much of a layer moves to host memory: plain data and its arithmetic.

A layer's slot (rounding buffer) holds the activations that survive from its forward to its backward. While a layer
computes, the slot of its neighbour is copied: to the host in forward, back in backward.

    compute    | forward i        | forward i+1      | ...  | backward i+1 + recompute | backward i ...
    offload                       | slot i -> host   |
    prefetch                                                | host -> slot i           |
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import inf

from memo.config.memory import OffloadPolicy
from memo.spec.disk import NO_RECORDS, Disk, RecordKind, Split, split_records

KEY_VALUE = "key_value"
"""The name, among tensors that always move, of the keys and values of layers that are swept."""

_SECONDS_TOLERANCE = 1e-9
"""Tolerance for seconds, which are measured: a copy that exactly fills its time must fit. Bytes have no tolerance."""


class Limit(StrEnum):
    """The limit that prevents more from moving."""

    OFFLOAD = "link (offload)"
    PREFETCH = "link (prefetch)"
    HOST = "host memory"
    DISK = "disk space"
    DISK_WRITE = "disk (write)"
    DISK_READ = "disk (read)"
    DEVICE = "device memory"
    REQUEST = "--offload-alpha"
    OTHERS = "another rank, which can move less"
    EVERYTHING = "nothing: everything moves"
    NO_MOVES = "nothing: no layer has to move"
    RESIDENT = "nothing: all activations fit in device memory"


_ORDER = [Limit.HOST, Limit.DISK, Limit.DEVICE, Limit.OFFLOAD, Limit.PREFETCH, Limit.DISK_WRITE, Limit.DISK_READ]


@dataclass(frozen=True)
class Link:
    """Copies in one direction, in bytes per second of one rank.

    0 under compute: copies and compute take turns, as on a CPU.
    """

    alone_bytes_per_s: float
    under_compute_bytes_per_s: float

    def copy_s(self, num_bytes: int, compute_s: float) -> float:
        """Seconds of a copy that starts together with `compute_s` of compute."""
        left_bytes = num_bytes - compute_s * self.under_compute_bytes_per_s
        if left_bytes <= 0:
            return num_bytes / self.under_compute_bytes_per_s
        return compute_s + left_bytes / self.alone_bytes_per_s


@dataclass(frozen=True)
class SwapGroup:
    """Tensors of one layer of which the same share of tokens moves and the rest is recomputed.

    Attributes:
        num_bytes: bytes of one layer and microbatch on this rank, at share 1.
        recompute_s: seconds to recompute all of it in backward, at share 0.
        buffer_bytes: device memory that share 1 takes beyond share 0, in proportion (both slots together).
        entry_bytes: device memory that any share above 0 takes at once.
    """

    name: str
    num_bytes: int
    recompute_s: float
    buffer_bytes: int
    entry_bytes: int = 0

    def moved_bytes(self, moving: int, tiles: int) -> int:
        """Bytes of one copy when `moving` of so many tiles move."""
        return -(-self.num_bytes * moving // tiles)

    def added_buffer_bytes(self, moving: int, tiles: int) -> int:
        """Device memory that `moving` of so many tiles take beyond none."""
        return -(-self.buffer_bytes * moving // tiles) + (self.entry_bytes if moving else 0)


@dataclass(frozen=True)
class SwapProblem:
    """The problem of one rank. Bytes and seconds are those of one pass, unless said otherwise.

    A pass is one microbatch through one layer, or through one section of it.

    Attributes:
        tiles: T: shares are multiples of 1 / T.
        always: {tensor: bytes} of tensors that move in full.
        groups: tensors that may move in part. Policy "paper" gives all groups one share, "auto" each its own.
        never: {tensor: bytes} of tensors that are always recomputed; the time for this belongs to backward_s.
        forward_s, backward_s: seconds of the layer that takes least, without the recomputation of groups.
        longer_s: seconds that both take longer on the average of all layers, where these are of several kinds.
        num_passes: layers x microbatches of one step.
        num_moves: passes whose activations leave the device (from the swap plan).
        num_records: host records alive at the peak, one for each layer and microbatch that is away.
        host_bytes: host memory for this rank's records.
        device_bytes: device memory for rounding buffers, or for all activations if they stay.
        fixed_buffer_bytes: device memory of the buffers when every share is 0.
        resident_bytes: device memory of all activations if they stay; None: unknown.
        sections: parts of a layer, each of which is a pass of its own where layers are swept (memo.spec.sweep).
        keys: records of the keys and values of layers that are swept, apart from all other records. A pass moves a part
            of one if its layer has keys and values; `always` has the average over all layers.
        inputs: records of the inputs of layers that recompute attention, apart from all other records.
        hidden: records of hidden states, which never go to a disk; each pass writes one and reads another one.
        disk: the part of a disk for records; None: all records are in host memory.
    """

    policy: OffloadPolicy
    tiles: int
    always: dict[str, int]
    groups: tuple[SwapGroup, ...]
    never: dict[str, int]
    forward_s: float
    backward_s: float
    offload: Link
    prefetch: Link
    num_passes: int
    num_moves: int
    num_records: int
    host_bytes: int
    device_bytes: int
    fixed_buffer_bytes: int
    resident_bytes: int | None = None
    sections: int = 1
    keys: RecordKind = NO_RECORDS
    inputs: RecordKind = NO_RECORDS
    hidden: RecordKind = NO_RECORDS
    disk: Disk | None = None
    longer_s: float = 0.0

    @cached_property
    def always_bytes(self) -> int:
        return sum(self.always.values())

    @property
    def fits_resident(self) -> bool:
        """Whether all activations fit in device memory, so that nothing has to be moved or recomputed."""
        return self.resident_bytes is not None and self.resident_bytes <= self.device_bytes

    def uniform(self, tiles: int) -> dict[str, int]:
        """The same number of tiles for every group."""
        return {group.name: tiles for group in self.groups}

    def moved_bytes(self, tiles: dict[str, int]) -> int:
        """Bytes of one copy when `tiles[group]` of the T tiles move."""
        return self.always_bytes + sum(g.moved_bytes(tiles[g.name], self.tiles) for g in self.groups)

    def copied_bytes(self, moved_bytes: int) -> int:
        """Bytes that a pass copies each way if it moves `moved_bytes` of a slot: these, and a section of hidden states.

        Hidden states are also read in forwards and written in backwards, against the direction of all else, which takes
        longer.
        """
        return moved_bytes + self.hidden.num_bytes

    def record_bytes(self, moved_bytes: int) -> int:
        """Bytes of all records if each pass moves `moved_bytes`."""
        return sum(kind.total_bytes for kind in self.record_kinds(moved_bytes)) + self.hidden.total_bytes

    def buffer_bytes(self, tiles: dict[str, int]) -> int:
        """Device memory of the rounding buffers."""
        return self.fixed_buffer_bytes + sum(g.added_buffer_bytes(tiles[g.name], self.tiles) for g in self.groups)

    def split(self, moved_bytes: int) -> Split | None:
        """Which records are on disk if each pass moves `moved_bytes`. None where host memory does not suffice, or with
        a disk not even for its staging buffers."""
        if self.disk is None:
            whole = self.record_bytes(moved_bytes)
            return Split((0, 0, 0), whole, 0) if whole <= self.host_bytes else None
        stays = self.hidden.total_bytes
        split = split_records(self.record_kinds(moved_bytes), self.host_bytes - stays)
        return None if split is None else split._replace(host_bytes=split.host_bytes + stays)

    def record_kinds(self, moved_bytes: int) -> list[RecordKind]:
        """Host records that may go to a disk: of keys and values, of inputs, and of slots."""
        return [self.keys, self.inputs, RecordKind(self.num_records, moved_bytes - self.always.get(KEY_VALUE, 0))]

    def recompute_s(self, tiles: dict[str, int]) -> float:
        """Seconds that the backward of a pass spends on recomputing groups."""
        return sum(g.recompute_s * (self.tiles - tiles[g.name]) / self.tiles for g in self.groups)

    def computed_s(self, tiles: dict[str, int]) -> float:
        """Seconds of forward and backward of a pass with its recomputation, on the average of all layers."""
        return self.forward_s + self.backward_s + self.recompute_s(tiles) + self.longer_s

    def violated(self, tiles: dict[str, int]) -> list[Limit]:
        """The limits that these tiles violate, those of memory first; more tiles violate at least the same limits."""
        moved = self.moved_bytes(tiles)
        broken = self.violated_by_copies(moved) + self.violated_in_backward(moved, self.recompute_s(tiles))
        if self.buffer_bytes(tiles) > self.device_bytes:
            broken.append(Limit.DEVICE)
        return sorted(broken, key=_ORDER.index)

    def violated_by_copies(self, moved: int) -> list[Limit]:
        """The limits of host memory, disk and the forward that `moved` bytes of one copy violate."""
        broken, split, late_s = [], self.split(moved), self.forward_s * (1 + _SECONDS_TOLERANCE)
        if split is None:
            broken.append(Limit.HOST)
        elif self.disk is not None and split.disk_bytes > self.disk.num_bytes:
            broken.append(Limit.DISK)
        if self.num_moves and self.offload.copy_s(self.copied_bytes(moved), self.forward_s) > late_s:
            broken.append(Limit.OFFLOAD)
        if self._passes_disk(split) and self.disk is not None and moved > late_s * self.disk.write_bytes_per_s:
            broken.append(Limit.DISK_WRITE)
        return broken

    def violated_in_backward(self, moved: int, recompute_s: float) -> list[Limit]:
        """The limits of the backward that `moved` bytes of one copy and `recompute_s` of recomputation violate."""
        if not self.num_moves:
            return []
        broken, backward_s = [], self.backward_s + recompute_s
        late_s = backward_s * (1 + _SECONDS_TOLERANCE)
        if self.prefetch.copy_s(self.copied_bytes(moved), backward_s) > late_s:
            broken.append(Limit.PREFETCH)
        if (
            self.disk is not None
            and moved > late_s * self.disk.read_bytes_per_s
            and self._passes_disk(self.split(moved))
        ):
            broken.append(Limit.DISK_READ)
        return broken

    def _passes_disk(self, split: Split | None) -> bool:
        return self.num_moves > 0 and split is not None and split.disk_bytes > 0

    def use(self, limit: Limit, tiles: dict[str, int]) -> float:
        """The share of a limit of memory or of a link that these tiles use."""
        moved, backward_s = self.moved_bytes(tiles), self.backward_s + self.recompute_s(tiles)
        split, copied, disk = self.split(moved), self.copied_bytes(moved), self.disk or Disk(0, 0.0, 0.0)
        taken, available = {
            Limit.HOST: (self.record_bytes(moved), self.host_bytes),
            Limit.DISK: (0 if split is None else split.disk_bytes, disk.num_bytes),
            Limit.DISK_WRITE: (moved, self.forward_s * disk.write_bytes_per_s),
            Limit.DISK_READ: (moved, backward_s * disk.read_bytes_per_s),
            Limit.DEVICE: (self.buffer_bytes(tiles), self.device_bytes),
            Limit.OFFLOAD: (self.offload.copy_s(copied, self.forward_s), self.forward_s),
            Limit.PREFETCH: (self.prefetch.copy_s(copied, backward_s), backward_s),
        }[limit]
        return taken / available if available else inf
