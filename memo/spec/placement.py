"""Where the states of each layer live on one rank: the placement, as data.

The states of a layer are one unit; two layers of a rank may differ in the side on which their states are.

    kind         on the device                        in host memory
    optimizer    master, moments (shard)              updated there; its reduced gradient too
    gradients    main gradient, whole                 in a slot while its backward runs, then reduced and moved
    weights      whole                                in a slot while its forward or backward runs

Slots are rounding buffers, as for activations: few, each as large as one layer. ZeRO-2 and ZeRO-3 also keep gradients
and weights of every layer in slots; outside of slots there is only this rank's shard of them, on either side.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.memory import OffloadStates

NUM_STATE_SLOTS = 2
"""Slots of weights, and slots of gradients, at most: one layer computes while its neighbour is copied."""


class LayerPlaces(NamedTuple):
    """Where one layer's states are.

    Attributes:
        optimizer_on_host: masters, moments and reduced gradient; the layer is updated by the CPU.
        gradients_in_slot: the main gradient exists only from the layer's backward to its reduction.
        weights_in_slot: the weights exist only while the layer runs; their source is on the side of the masters.
    """

    optimizer_on_host: bool = False
    gradients_in_slot: bool = False
    weights_in_slot: bool = False

    @property
    def in_slot(self) -> bool:
        return self.gradients_in_slot or self.weights_in_slot

    @property
    def is_driven(self) -> bool:
        """Whether the layer's gradient is reduced and moved on its own, beside the backwards (memo.executor.states)."""
        return self.optimizer_on_host or self.gradients_in_slot


class StatePlacement(NamedTuple):
    """How many of the `layers` of one rank have which states in host memory; gradients and weights at most as many as
    optimizers.

    Attributes:
        shards_gradients, shards_weights: ZeRO-2, ZeRO-3, for every layer.
        weight_copy: whether streamed weights come from a copy in the dtype of training, and not from the masters.
    """

    layers: int
    optimizer: int = 0
    gradients: int = 0
    weights: int = 0
    shards_gradients: bool = False
    shards_weights: bool = False
    weight_copy: bool = True

    @property
    def ends_on_host(self) -> bool:
        """Whether embedding and head are updated on the host too; their weights and gradients stay on the device."""
        return self.layers > 0 and self.optimizer == self.layers

    @property
    def streams(self) -> bool:
        """Whether any state is ever in a slot or on the host."""
        return bool(self.optimizer) or self.shards_gradients or self.shards_weights

    @property
    def gradients_in_slots(self) -> int:
        """Layers whose gradients have no place of their own on the device."""
        return self.layers if self.shards_gradients else self.gradients

    @property
    def weights_in_slots(self) -> int:
        return self.layers if self.shards_weights else self.weights

    @property
    def weights_from_host(self) -> int:
        """Layers whose weights are fetched from host memory."""
        return self.optimizer if self.shards_weights else self.weights

    @property
    def num_driven(self) -> int:
        """Layers whose gradients are reduced and moved on their own (`LayerPlaces.is_driven`)."""
        return max(self.optimizer, self.gradients_in_slots)

    def of_layer(self, position: int) -> LayerPlaces:
        """Places of the layer at `position` on this rank, counted over its chunks."""
        rank = spread(self.layers)[position]
        return LayerPlaces(
            rank < self.optimizer,
            self.shards_gradients or rank < self.gradients,
            self.shards_weights or rank < self.weights,
        )

    @property
    def of_ends(self) -> LayerPlaces:
        return LayerPlaces(optimizer_on_host=self.ends_on_host)


def placement_of(config: RunConfig, world_size: int) -> StatePlacement:
    """The placement that a configuration without "auto" asks for, the same on every rank. See memo.config.memory."""
    memory, parallel = config.memory, config.parallel
    is_shared = parallel.dp(world_size) * parallel.cp > 1
    layers = config.model.num_layers // parallel.pp
    counts = [0, 0, 0]
    if memory.offload_states in ("optimizer", "all"):
        rest = 1.0 if memory.offload_states == "all" else 0.0
        given = (memory.optimizer_offload_fraction, memory.gradient_offload_fraction, memory.weight_offload_fraction)
        shares = [default if share is None else share for share, default in zip(given, (1.0, rest, rest), strict=True)]
        counts = [count_of(share, layers) for share in shares]
    return StatePlacement(
        layers,
        counts[0],
        min(counts[1], counts[0]),
        min(counts[2], counts[0]),
        is_shared and parallel.shards_gradients,
        is_shared and parallel.shards_weights,
        memory.offload_weight_copy,
    )


def with_placement(config: RunConfig, placement: StatePlacement) -> RunConfig:
    """`config` with the flags of a placement; `placement_of` is the inverse."""
    kind: OffloadStates = "none"
    if placement.optimizer:
        kind = "all" if placement.gradients or placement.weights else "optimizer"

    def share(count: int, default: int) -> float | None:
        return None if kind == "none" or count == default else count / placement.layers

    rest = placement.layers if kind == "all" else 0
    memory = replace(
        config.memory,
        offload_states=kind,
        optimizer_offload_fraction=share(placement.optimizer, placement.layers),
        gradient_offload_fraction=share(placement.gradients, rest),
        weight_offload_fraction=share(placement.weights, rest),
        offload_weight_copy=placement.weight_copy or kind != "all",
    )
    return replace(config, memory=memory)


def count_of(share: float, layers: int) -> int:
    """Layers of a share, rounded up: memory that was to be freed is freed."""
    return math.ceil(share * layers - 1e-9)


@cache
def spread(layers: int) -> tuple[int, ...]:
    """For each layer its turn to go to host memory.

    The layers of the first turns, however many, lie as far apart as they can (the van der Corput order), so that the
    copies of one layer find other layers to hide under. The last layer goes first: its forward and its backward need
    one copy.
    """
    bits = max(1, (layers - 1).bit_length())
    backwards = [int(f"{place:0{bits}b}"[::-1], 2) for place in range(1 << bits)]
    order = [layers - 1 - place for place in backwards if place < layers]
    turns = [0] * layers
    for turn, position in enumerate(order):
        turns[position] = turn
    return tuple(turns)


def next_in_slots(needed: Sequence[int | None], slots: int = NUM_STATE_SLOTS) -> list[tuple[int, ...]]:
    """For each step the layers that its slots shall hold: the next `slots` different ones, its own layer first.

    Computed from the last step to the first: the layer of a step is put in front of those that follow it.

    Args:
        needed: for each step the layer that needs a slot; None: no layer does.
    """
    found: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for layer in reversed(needed):
        if layer is not None and not (following and following[0] == layer):
            following = (layer, *[other for other in following if other != layer])[:slots]
        found.append(following)
    return found[::-1]
