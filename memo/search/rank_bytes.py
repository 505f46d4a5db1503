"""Bytes of a run's ranks with any placement of their states: bytes of the states, and bytes of a whole device.

Objects here hold no reference to the `Costs` that use them, so there is no cycle: refused candidates of a search are
freed at once, without garbage collection.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil

from memo.config import RunConfig
from memo.estimate.accounts import Account
from memo.estimate.memory_account import device_bytes, worst_stages
from memo.estimate.state_memory import placed_bytes, state_sizes
from memo.estimate.unseen_memory import Links, page_table_bytes
from memo.spec.buckets import rank_units
from memo.spec.placement import StatePlacement, placement_of, with_placement
from memo.spec.shapes import shape_of
from memo.spec.slots import Moved

DeviceBytes = Callable[[StatePlacement], int]


class RankBytes:
    """Bytes of the ranks of the stages that may need most.

    Attributes:
        sizes: sizes of a rank's states.
        none: the placement of all states on the device.
        states: function from placement and stage to the bytes of the states.
    """

    def __init__(self, config: RunConfig, world_size: int, device: str, links: Links) -> None:
        self._world_size, self._device = world_size, device
        self._account = Account("memo", shape_of(config.model, "", config.data.seq_length), world_size, links=links)
        self._stages = worst_stages(config)
        self.sizes = sizes = state_sizes(config, world_size)
        self.none = placement_of(config, world_size)
        units = {stage: rank_units(config, world_size, stage) for stage in self._stages}
        self.states = cache(lambda placement, stage: placed_bytes(units[stage], placement, sizes))

    def of_device(self, config: RunConfig, moved: Moved | None) -> DeviceBytes:
        """Return a function from placement to device bytes on the stage that needs most, under a use of activations."""
        if self._device == "cpu":
            return cache(
                lambda placement: max(
                    device_bytes(with_placement(config, placement), self._world_size, stage, moved)
                    for stage in self._stages
                )
            )
        return self._beside_states(config, moved)

    def _beside_states(self, config: RunConfig, moved: Moved | None) -> DeviceBytes:
        """Return a function from placement to the device bytes of a GPU, by interpolation.

        The bytes besides the states are computed for two placements: all states on the device, and all optimizers in
        host memory. Between these, the bytes decrease with the number of reduced gradients that wait on the device for
        their update. At each moment of a step the gradients of all layers left on the device wait, or none; so the peak
        lies below the straight line between the two values.
        """
        none, every = self.none, replace(self.none, optimizer=self.none.layers)

        @cache
        def rests(placement: StatePlacement) -> dict[int, int]:
            run = config if placement == none else with_placement(config, placement)
            ranks = self._account.stages(run, moved).items()
            return {stage: rank.total - self._states_bytes(placement, stage) for stage, rank in ranks}

        def needed(placement: StatePlacement) -> int:
            share = placement.num_driven / placement.layers
            low = rests(none if share < 1 or none.shards_gradients else every)
            high = rests(every) if 0 < share < 1 else low
            return max(
                self._states_bytes(placement, stage) + ceil(rest + share * (high[stage] - rest))
                for stage, rest in low.items()
            )

        return cache(needed)

    def _states_bytes(self, placement: StatePlacement, stage: int) -> int:
        """Return the GPU bytes of states: states on the GPU, and page tables of states in host memory."""
        states = self.states(placement, stage)
        return states.device + page_table_bytes(states.host)
