"""Costs of a placement of states with a use of activations: bytes of memory, and seconds of each link.

The costs of placements and of uses of activations are computed separately, because they only add up:

    device, host    the sum of the bytes of both, on the first and last stage and on a node. On a CPU each pair is
                    counted to the byte instead, because the moment of the peak depends on both.
    h2d, d2h        the sum of the seconds of both, which share the links
    step            about max(pipeline + update, h2d, d2h, dp link, CPU)
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import ceil, inf
from operator import add
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_dtype
from memo.estimate.accounts import Account
from memo.estimate.attention_rates import with_attention_of
from memo.estimate.hardware import Hardware
from memo.estimate.memory_account import device_bytes, worst_stages
from memo.estimate.node_memory import most_of_a_node
from memo.estimate.state_memory import placed_bytes, state_sizes
from memo.estimate.swap_memory import host_bytes
from memo.estimate.unseen_memory import Links, page_table_bytes
from memo.estimate.verdict import MemoryLimits
from memo.planner.problem import SwapProblem
from memo.simulate.cost import LayerCost
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.predict import StepPrediction, predict_step
from memo.simulate.stage import microbatch_s
from memo.simulate.states import state_times
from memo.simulate.swapping import choose, layer_times, modelled_problem, ways_to_move
from memo.spec.buckets import rank_units
from memo.spec.placement import StatePlacement, placement_of, with_placement
from memo.spec.shapes import shape_of
from memo.spec.slots import Moved, nothing_moved

_MOST_USES = 8
"""Number of shares of the activations that are tried."""

DeviceBytes = Callable[[StatePlacement], int]


class RankBytes:
    """Bytes of the ranks of the stages that may need most, with any placement of their states.

    It holds no reference to the `Costs` that use it, so there is no cycle: refused candidates of a search are freed at
    once, without garbage collection.

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
        none, every = self.none, self.none._replace(optimizer=self.none.layers)

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


@dataclass
class ActivationUse:
    """A use of activations: kept, recomputed, or swapped in part.

    Attributes:
        config: the run, with --offload-alpha off if nothing moves under auto.
        moved: tiles by group under --offload-alpha auto; None: nothing moves, or what the configuration says.
        device_bytes: function from placement to bytes of a rank's device, on the stage that needs most.
        host_bytes: bytes of host memory of one rank without its states, by stage.
        simulate: function that simulates a step of a run, with states where the run's configuration places them.
    """

    config: RunConfig
    moved: Mapping[str, int] | None
    device_bytes: DeviceBytes
    host_bytes: list[int]
    simulate: Callable[[RunConfig], StepPrediction]

    @cached_property
    def step(self) -> StepPrediction:
        """The simulated step with all states on the device; computed only for uses that fit."""
        return self.simulate(self.config)

    @cached_property
    def after_s(self) -> float:
        """Seconds of `step` after its last backward."""
        return self.step.seconds["data"] + self.step.seconds["optimizer"]

    @property
    def pipeline_s(self) -> float:
        """Seconds of `step` up to its last backward; no placement of states makes them fewer."""
        return self.step.step_time_s - self.after_s


class PlacementCosts(NamedTuple):
    """Costs of the states alone: seconds of the busiest stage. `last_d2h_s` is the part of `d2h_s` that belongs to the
    backward of the last microbatch."""

    h2d_s: float
    d2h_s: float
    last_d2h_s: float
    dp_s: float
    cpu_s: float


def _placement_costs(config: RunConfig, kernels: Kernels, world_size: int, placement: StatePlacement) -> PlacementCosts:
    ends = sorted({0, config.parallel.pp - 1})
    found = (state_times(config, kernels, world_size, stage, placement) for stage in ends)
    times = [stage for stage in found if stage is not None]
    return PlacementCosts(
        *(max((getattr(stage, cost) for stage in times), default=0.0) for cost in PlacementCosts._fields)
    )


def _simulate(
    world_size: int,
    hardware: Hardware,
    tiles: Mapping[str, int] | None,
    layer: Callable[[], LayerCost],
    config: RunConfig,
) -> StepPrediction:
    """Simulate a step; `layer` returns the cost of a swapped layer, whose kernels know no --peak-tflops."""
    known = layer() if config.memory.swaps and config.hardware.peak_tflops is None else None
    return predict_step(config, world_size, hardware, tiles, layer=known)


@dataclass
class Costs:
    """Costs of one run under any placement of states, whatever its --offload-states; costs that placements share are
    computed once.

    Attributes:
        layer: function that returns the cost of a swapped layer; default: it is computed.
        bound: function from the seconds of forward and backward of an average layer to a lower bound of the seconds of
            a step; for None, the bound that holds for every use of activations.
    """

    config: RunConfig
    world_size: int
    hardware: Hardware
    limits: MemoryLimits
    layer: Callable[[], LayerCost] | None = None
    bound: Callable[[float | None], float] = lambda layer_s: 0.0

    def __post_init__(self) -> None:
        self.config = replace(self.config, memory=replace(self.config.memory, offload_states="none"))
        self._ranks = RankBytes(self.config, self.world_size, self.hardware.device, self.limits.links)
        self.sizes, self.none = self._ranks.sizes, self._ranks.none
        machine = with_attention_of(self.hardware, self.config)
        self.kernels = Kernels(machine, resolved_dtype(self.config.training, self.hardware.device))
        self.of = cache(partial(_placement_costs, self.config, self.kernels, self.world_size))
        self._layer = self.layer or cache(partial(swapped_layer, self.config, self.kernels))
        self.seen: dict[StatePlacement, tuple[float, ActivationUse | None]] = {}  # results of `best_use` so far

    @cached_property
    def frugal_uses(self) -> list[ActivationUse]:
        """The uses that need least memory.

        The first moves nothing and needs least host memory. Under alpha auto a second one moves only the activations
        that always move, and needs least device memory. It is the only one of swept layers, as layers of which nothing
        moves are whole.
        """
        memory = self.config.memory
        if not self._is_auto:
            alpha = memory.offload_alpha if memory.swaps and isinstance(memory.offload_alpha, float) else None
            return [self._use(self.config, None, alpha)]
        moved = nothing_moved(self.config.model, memory.offload_policy)
        least = self._use(self.config, moved, moved)
        if memory.sweeps:
            return [least]
        plain = replace(self.config, memory=replace(memory, offload_alpha="off"))
        return [self._use(plain, None, None), least]

    @cached_property
    def uses(self) -> list[ActivationUse]:
        """The frugal uses, and uses that move more, up to everything. On a CPU the frugal uses alone, because each use
        is counted tensor by tensor there."""
        if not self._is_auto or self.hardware.device == "cpu":
            return self.frugal_uses
        step = ceil(len(self._moves) / _MOST_USES)
        chosen = [*self._moves[step:-1:step], self._moves[-1]]
        return [*self.frugal_uses, *(self._use(self.config, tiles, tiles) for tiles in chosen)]

    @property
    def _is_auto(self) -> bool:
        return self.config.memory.swaps and self.config.memory.offload_alpha == "auto"

    @property
    def _is_depth_first(self) -> bool:
        return self.config.parallel.gradient_accumulation_order == "depth_first"

    @cached_property
    def num_parts(self) -> int:
        """Number of parts of a step, each of which has one forward and one backward of a layer after the other: the
        microbatches, or the whole step if all microbatches pass a layer before the next."""
        return num_microbatches(self.config, self.world_size) if self._is_depth_first else 1

    @cached_property
    def _problem(self) -> SwapProblem:
        return modelled_problem(self.config, self.world_size, self.hardware, self._layer())

    @cached_property
    def _moves(self) -> list[dict[str, int]]:
        return ways_to_move(self._problem)

    def within(self, limits: MemoryLimits, uses: Sequence[ActivationUse] | None = None) -> "Costs":
        """Return the same costs under other limits, and with only some of the uses of activations."""
        found = copy(self)
        found.limits, found.seen = limits, {}
        if uses is not None:
            found.uses = list(uses)
        return found

    def least_s(self, use: ActivationUse, *, with_waits: bool = False) -> float:
        """Return a lower bound of the seconds of a step with a use of activations, wherever the states are.

        `with_waits`: count the waits for copies of activations, which takes longer.
        """
        if use.moved is None:
            return self.bound(None)
        problem, tiles = self._problem, dict(use.moved)
        if not (with_waits and self.config.parallel.pp == 1 and self._is_depth_first):
            return self.bound(problem.sections * problem.computed_s(tiles))
        times = layer_times(problem, choose(problem, tiles), self.hardware).of_stack(self._layer().by_layer)
        num_layers = self.config.model.num_layers
        return self.bound(microbatch_s(times, num_layers) / num_layers)

    def rough_s(self, placement: StatePlacement, use: ActivationUse) -> float:
        """Return an estimate of the seconds of a step, to compare placements before they are simulated.

        The step need not fit.

        Known error: it assumes that a backward lasts twice a forward, that copies wait for their link alone, and that
        the update of embedding and head hides as that of layers.
        """
        costs, busy_s = self.of(placement), use.step.resources
        share_here = 0.0 if placement.ends_on_host else 1.0 - placement.optimizer / placement.layers
        links = busy_s["h2d"] + costs.h2d_s, busy_s["d2h"] + costs.d2h_s, costs.dp_s
        first_s = use.pipeline_s / 3 / self.num_parts  # the forward that hides the updates of all layers but the first
        last_s = 2 * first_s  # the backward that hides the offload of reduced gradients
        waits_s = max(0.0, costs.last_d2h_s - last_s)
        if placement.optimizer and self.sizes.clips:
            waits_s += max(costs.cpu_s / placement.optimizer, costs.cpu_s - first_s)
        return max(use.pipeline_s + waits_s + use.after_s * share_here, *links, costs.cpu_s)

    def best_use(self, placement: StatePlacement) -> tuple[float, ActivationUse | None]:
        """Return (seconds, use) of the fastest use that fits; infinite seconds and None if none fits."""
        if placement not in self.seen:
            found = [(self.rough_s(placement, use), use) for use in self.uses if self.holds(placement, use)]
            self.seen[placement] = min(found, key=lambda pair: pair[0], default=(inf, None))
        return self.seen[placement]

    def needed(self, placement: StatePlacement, use: ActivationUse) -> tuple[int, int]:
        """Return the bytes of a rank's device, on the stage that needs most, and of a node's host memory."""
        return use.device_bytes(placement), self._host_bytes(placement, use)

    def excess(self, placement: StatePlacement, use: ActivationUse) -> tuple[float, float]:
        """Return (device, host): bytes needed, divided by bytes available."""
        device, host = self.needed(placement, use)
        return device / max(1.0, self.limits.device_bytes), host / max(1.0, self.limits.host_bytes)

    def _host_bytes(self, placement: StatePlacement, use: ActivationUse) -> int:
        last = self.config.parallel.pp - 1
        kinds = [0, *[1] * (last - 1), last] if last else [0]
        ranks = map(add, (self._ranks.states(placement, kind).host for kind in kinds), use.host_bytes)
        return most_of_a_node(ranks, self.world_size // self.config.parallel.pp, self.limits.local_ranks)

    def holds(self, placement: StatePlacement, use: ActivationUse) -> bool:
        """Return whether a placement and a use fit together, on the device and in host memory."""
        return self.fits_host(placement, use) and self.fits_device(placement, use)

    def fits_host(self, placement: StatePlacement, use: ActivationUse) -> bool:
        return self._host_bytes(placement, use) <= max(1.0, self.limits.host_bytes)

    def fits_device(self, placement: StatePlacement, use: ActivationUse) -> bool:
        return use.device_bytes(placement) <= max(1.0, self.limits.device_bytes)

    def _use(self, config: RunConfig, tiles: Mapping[str, int] | None, moved: Moved | None) -> ActivationUse:
        disk_bytes = self.limits.disk_bytes / self.limits.local_ranks
        return ActivationUse(
            config,
            tiles,
            self._ranks.of_device(config, moved),
            host_bytes(config, self.world_size, moved, disk_bytes),
            partial(_simulate, self.world_size, self.hardware, tiles, self._layer),
        )
