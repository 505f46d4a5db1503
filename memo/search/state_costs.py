"""What a placement of states and a way of activations take together: bytes, and seconds of each link.

Where a run's states may go and what its activations may do are worked out apart, because they meet in sums alone:

    device, host        bytes of both add up                                     (first and last stage; a node)
                        but on a CPU, where each pair is counted to the byte: when most is held depends on both
    h2d, d2h            seconds of both add up                                   (they share the links)
    a step takes        about max(pipeline + update, h2d, d2h, dp link, CPU)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, inf

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_dtype
from memo.estimate.accounts import Account
from memo.estimate.device_memory import device_bytes
from memo.estimate.hardware import Hardware
from memo.estimate.rank_memory import most_of_a_node, placed_device_bytes, shape_units
from memo.estimate.state_memory import placed_bytes, state_sizes
from memo.estimate.swap_memory import num_records
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.predict import StepPrediction, predict_step
from memo.simulate.states import state_times
from memo.simulate.swapping import swap_problem, ways_to_move
from memo.spec.buckets import RankUnits, rank_units
from memo.spec.placement import StatePlacement, placement_of, with_placement
from memo.spec.shapes import shape_of
from memo.spec.slots import Moved, slot_layout

_MOST_WAYS = 8
"""Shares of the activations that are tried."""


@dataclass(frozen=True)
class Room:
    """Bytes that one rank may take of its device, and the ranks of one node together of host memory."""

    device_bytes: float
    host_bytes: float
    local_ranks: int


@dataclass
class Way:
    """What activations do.

    Attributes:
        config: with --offload-alpha off where nothing moves under auto.
        moved: tiles by group under --offload-alpha auto; None: nothing moves, or what the configuration says.
        device_bytes: of a rank under a placement, on the stage that needs most.
        host_bytes: by stage, of one rank, all but its states.
    """

    config: RunConfig
    moved: Mapping[str, int] | None
    device_bytes: Callable[[StatePlacement], int]
    host_bytes: dict[int, int]
    simulate: Callable[[RunConfig, Mapping[str, int] | None], StepPrediction]

    @cached_property
    def step(self) -> StepPrediction:
        """With all states on the device; asked for only where the memory suffices."""
        return self.simulate(self.config, self.moved)

    @cached_property
    def after_s(self) -> float:
        """Of that step, what follows the last backward."""
        return self.step.seconds["data"] + self.step.seconds["optimizer"]


@dataclass(frozen=True)
class PlacementCosts:
    """Of states alone: bytes by stage, of one rank; seconds of the busiest stage.

    Attributes:
        last_d2h_s: of d2h_s, that of the last microbatch's backward.
    """

    host_bytes: dict[int, int]
    h2d_s: float
    d2h_s: float
    last_d2h_s: float
    dp_s: float
    cpu_s: float


@dataclass
class Costs:
    """Of one run without states in host memory; all that placements share is worked out once.

    Args:
        config: its --offload-states is not read.
        account: of memory on a GPU; default: memo's own.
    """

    config: RunConfig
    world_size: int
    hardware: Hardware
    room: Room
    account: Account | None = None

    def __post_init__(self) -> None:
        self.config = replace(self.config, memory=replace(self.config.memory, offload_states="none"))
        self.sizes = state_sizes(self.config, self.world_size)
        self.none = placement_of(self.config, self.world_size)
        self.kernels = Kernels(self.hardware, resolved_dtype(self.config, self.hardware.device))
        self._known: dict[StatePlacement, PlacementCosts] = {}
        self._best: dict[StatePlacement, tuple[float, Way | None]] = {}
        last = self.config.parallel.pp - 1
        self._ends, self._kinds = sorted({0, last}), sorted({0, min(1, last), last})  # stages that differ

    @cached_property
    def frugal_ways(self) -> list[Way]:
        """Nothing moves, which needs least host memory, and where it may: only what always does, which leaves least on
        the device."""
        memory = self.config.memory
        if not self._is_auto:
            alpha = memory.offload_alpha if memory.swaps and isinstance(memory.offload_alpha, float) else None
            return [self._way(self.config, None, alpha)]
        plain = replace(self.config, memory=replace(memory, offload_alpha="off"))
        return [self._way(plain, None, None), self._way(self.config, self._moves[0], self._moves[0])]

    @cached_property
    def ways(self) -> list[Way]:
        """Those and more that move, up to everything. On a CPU no more: there memory is counted tensor by tensor."""
        if not self._is_auto or self.hardware.device == "cpu":
            return self.frugal_ways
        step = ceil(len(self._moves) / _MOST_WAYS)
        chosen = [*self._moves[step:-1:step], self._moves[-1]]
        return [*self.frugal_ways, *(self._way(self.config, tiles, tiles) for tiles in chosen)]

    @property
    def _is_auto(self) -> bool:
        return self.config.memory.swaps and self.config.memory.offload_alpha == "auto"

    @cached_property
    def _moves(self) -> list[dict[str, int]]:
        layer = swapped_layer(self.config, self.kernels)
        return ways_to_move(swap_problem(self.config, self.world_size, self.hardware, layer))

    def rough_s(self, placement: StatePlacement, way: Way) -> float:
        """Seconds of a step, whether it fits or not: to compare placements by, before some are simulated.

        Known error: a backward is taken to last twice a forward, and copies to wait for nothing but their link.
        """
        costs, step = self.of(placement), way.step
        after_s = max(way.after_s * self._share_here(placement), costs.cpu_s * self.sizes.clips)
        links = step.resources["h2d"] + costs.h2d_s, step.resources["d2h"] + costs.d2h_s, costs.dp_s
        pipeline_s = step.step_time_s - way.after_s
        last_s = pipeline_s * 2 / 3 / num_microbatches(self.config, self.world_size)  # when reduced gradients leave
        return max(pipeline_s + max(0.0, costs.last_d2h_s - last_s) + after_s, *links, costs.cpu_s)

    def best_way(self, placement: StatePlacement) -> tuple[float, Way | None]:
        """(seconds, way) of the fastest that fits; endless where none does."""
        found: tuple[float, Way | None] = inf, None
        if placement in self._best:
            return self._best[placement]
        for way in self.ways:
            if max(self.excess(placement, way)) <= 1:
                found = min(found, (self.rough_s(placement, way), way), key=lambda pair: pair[0])
        self._best[placement] = found
        return found

    @property
    def seen(self) -> list[StatePlacement]:
        """Placements that were compared."""
        return list(self._best)

    def needed(self, placement: StatePlacement, way: Way) -> tuple[int, int]:
        """Bytes of a rank's device on the stage that needs most, and of the host memory of a node."""
        costs, parallel = self.of(placement), self.config.parallel
        device = way.device_bytes(placement)
        last = parallel.pp - 1
        kinds = [0, *[1] * (last - 1), last] if last else [0]
        ranks = [costs.host_bytes[kind] + way.host_bytes[stage] for stage, kind in enumerate(kinds)]
        return device, most_of_a_node(ranks, self.world_size // parallel.pp, self.room.local_ranks)

    def excess(self, placement: StatePlacement, way: Way) -> tuple[float, float]:
        """What is needed over what there is: device, host."""
        device, host = self.needed(placement, way)
        return device / max(1.0, self.room.device_bytes), host / max(1.0, self.room.host_bytes)

    def of(self, placement: StatePlacement) -> PlacementCosts:
        if placement not in self._known:
            self._known[placement] = self._of(placement)
        return self._known[placement]

    def _of(self, placement: StatePlacement) -> PlacementCosts:
        bytes_of = {stage: placed_bytes(self._units[stage], placement, self.sizes) for stage in self._kinds}
        host = {stage: found.host for stage, found in bytes_of.items()}
        if not placement.streams:
            return PlacementCosts(host, 0.0, 0.0, 0.0, 0.0, 0.0)
        found = (state_times(self.config, self.kernels, self.world_size, stage, placement) for stage in self._ends)
        times = [stage for stage in found if stage is not None]
        return PlacementCosts(
            host,
            max(stage.h2d_s for stage in times),
            max(stage.d2h_s for stage in times),
            max(stage.last_d2h_s for stage in times),
            max(stage.dp_s for stage in times),
            max(stage.cpu_s for stage in times),
        )

    def _share_here(self, placement: StatePlacement) -> float:
        return 0.0 if placement.ends_on_host else 1.0 - placement.optimizer / placement.layers

    @cached_property
    def _units(self) -> dict[int, RankUnits]:
        """By stage."""
        account = self._account
        if account.program == "memo":
            return {stage: rank_units(self.config, self.world_size, stage) for stage in self._kinds}
        return {stage: shape_units(self.config, account.shape, stage, self.sizes.shards) for stage in self._kinds}

    @cached_property
    def _account(self) -> Account:
        if self.account is not None:
            return self.account
        return Account("memo", shape_of(self.config.model, "", self.config.data.seq_length), self.world_size)

    def _placed(self, placement: StatePlacement, stage: int) -> int:
        if self._account.program == "memo":
            return placed_bytes(self._units[stage], placement, self.sizes).device
        return placed_device_bytes(self._units[stage], placement, self.sizes)

    def _device_bytes(self, config: RunConfig, moved: Moved | None) -> Callable[[StatePlacement], int]:
        """See Way."""
        if self.hardware.device == "cpu":
            return cache(
                lambda placement: max(
                    device_bytes(with_placement(config, placement), self.world_size, stage, moved)
                    for stage in self._ends
                )
            )
        rests = {stage: self._rests(config, stage, moved) for stage in self._ends}

        def needed(placement: StatePlacement) -> int:
            driven = placement.layers if placement.shards_gradients else placement.optimizer
            share = driven / placement.layers
            return max(
                self._placed(placement, stage) + ceil(none + share * (every - none))
                for stage, (none, every) in rests.items()
            )

        return cache(needed)

    def _rests(self, config: RunConfig, stage: int, moved: Moved | None) -> tuple[int, int]:
        """What a rank takes besides its states: with all of them on the device, and with all optimizers off it.

        Between them memo's own account falls with the reduced gradients that wait on the device for their update. Each
        moment of a step takes as many of them as layers are left, or none; so what the worst moment takes lies below
        the line from one to the other.
        """
        none = self._account.stage(config, stage, moved).total - self._placed(self.none, stage)
        if self._account.program != "memo" or self.none.shards_gradients:
            return none, none
        placement = replace(self.none, optimizer=self.none.layers)
        every = self._account.stage(with_placement(config, placement), stage, moved).total
        return none, every - self._placed(placement, stage)

    def _way(self, config: RunConfig, tiles: Mapping[str, int] | None, moved: Moved | None) -> Way:
        record = 0 if moved is None else slot_layout(config, moved).moved_bytes
        return Way(
            config,
            tiles,
            self._device_bytes(config, moved),
            {
                stage: record and record * num_records(config, self.world_size, stage)
                for stage in range(config.parallel.pp)
            },
            lambda run, tiles: predict_step(run, self.world_size, self.hardware, tiles),
        )
