"""Bytes of a run's ranks with any placement of their states: the states themselves, and all of a device.

Nothing here refers to the costs that ask, and so to itself: what a search has refused is freed at once, without a
garbage collection.
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
    """Of the stages that may need most.

    Attributes:
        sizes: what a rank's states are made of.
        none: the placement of all states on the device.
        states: bytes by placement and stage.
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
        """On the stage that needs most, under a use of activations."""
        if self._device == "cpu":
            return cache(
                lambda placement: max(
                    device_bytes(with_placement(config, placement), self._world_size, stage, moved)
                    for stage in self._stages
                )
            )
        return self._beside_states(config, moved)

    def _beside_states(self, config: RunConfig, moved: Moved | None) -> DeviceBytes:
        """Besides its states, a rank's bytes are known with all states on the device, and with all optimizers in host
        memory. For placements between the two, memo's own account decreases with the number of reduced gradients that
        wait on the device for their update. At each moment of a step these are as many as there are layers left on the
        device, or none; so the peak lies below the straight line between the two values.
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
        """Of a GPU: the states that are on it, and the page tables of those in host memory."""
        states = self.states(placement, stage)
        return states.device + page_table_bytes(states.host)
