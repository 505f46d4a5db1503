"""Chooses where states live under --offload-states auto, and how layers run under --offload-granularity auto: whole if
they fit, else swept in tiles.

The ways are tried from the cheapest on: whole layers, then sweeps in which as few layers recompute attention as host
memory allows, then these sweeps with hidden states in host memory (memo.search.sweeping). The first way that fits is
taken, whether it fits with all activations on the device or only with as few as possible.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from memo.config import RunConfig
from memo.errors import ResourceError
from memo.estimate.hardware import Hardware
from memo.estimate.verdict import MemoryLimits
from memo.search.state_costs import Costs
from memo.search.states import fits, place, shortage
from memo.search.sweeping import swept_refusal, ways_to_sweep
from memo.spec.placement import StatePlacement, placement_of, with_placement
from memo.spec.sweep import WHOLE, Sweep, with_sweep


@dataclass(frozen=True)
class Machine:
    """The machine on which a run must fit; its device has the lesser of its free memory and --device-memory-gib.
    `admits` tells whether a placed run also fits if device and host share one memory."""

    world_size: int
    hardware: Hardware
    limits: MemoryLimits
    admits: Callable[[RunConfig], bool] = lambda config: True

    def costs(self, config: RunConfig) -> Costs:
        return Costs(config, self.world_size, self.hardware, self.limits)


def resolve_states(config: RunConfig, machine: Machine) -> RunConfig:
    """Return `config` with --offload-states auto replaced by the fastest placement that fits.

    Any other configuration is returned unchanged. If everything fits on the device, nothing moves. `config` is checked,
    with a resolved device. Raises ResourceError if no placement fits; the message says which memory is short.
    """
    if config.memory.offload_states != "auto":
        return config
    costs = machine.costs(config)
    found = place(costs)
    if found is None:
        raise ResourceError(
            f"--offload-states auto finds no placement that fits: {shortage(costs)}: use a smaller --seq-length or "
            "--model, spread the run over more devices with --tp, --cp and --pp, or allow more with "
            "--device-memory-gib and --offload-host-memory-gib"
        )
    return with_placement(config, found.placement)


def resolve_granularity(
    config: RunConfig, machine: Machine, *, before: Sweep | None = None, must_fit: bool = True
) -> RunConfig:
    """Replace --offload-granularity auto by the first way that fits, and --offload-states auto by the fastest placement
    for this way.

    A configuration with another granularity is returned unchanged.

    Args:
        config: checked, its device resolved.
        before: how layers ran up to the checkpoint from which the run resumes. Its number of tiles is tried first, so
            that the run resumes with the same bits; recomputed attention and the place of hidden states change no bits.
        must_fit: whether to raise if nothing fits; otherwise the way that needs least memory is returned.

    Raises ResourceError if nothing fits; the message tells how much of which memory whole layers and the last sweep
    lack.
    """
    if config.memory.offload_granularity != "auto":
        return config
    last: RunConfig | None = None
    for sweep in dict.fromkeys(_ways(config, machine, before)):
        way = with_sweep(config, sweep)
        placed = _placed(way, machine)
        if placed is not None and machine.admits(placed):
            return placed
        last = placed or last
    if last is not None:  # the caller's own check of this run raises, with figures
        return last
    if must_fit:
        raise ResourceError(_message(config, machine))
    return resolve_states(way, machine)


def _ways(config: RunConfig, machine: Machine, before: Sweep | None) -> Iterator[Sweep]:
    again = (with_sweep(config, WHOLE), machine.world_size, machine.limits)
    return chain(
        () if before is None else ways_to_sweep(*again, before=before) if before.tiles else (WHOLE,),
        (WHOLE,),
        ways_to_sweep(*again),
    )


def _placed(way: RunConfig, machine: Machine) -> RunConfig | None:
    """Return the run with the placement of its states; None if it does not fit."""
    costs, given = machine.costs(way), _given(way, machine)
    if not fits(costs, given):
        return None
    if given is not None:
        return way
    found = place(costs)
    return None if found is None else with_placement(way, found.placement)


def _given(way: RunConfig, machine: Machine) -> StatePlacement | None:
    """Return the placement of states that the configuration states; None under --offload-states auto."""
    return None if way.memory.offload_states == "auto" else placement_of(way, machine.world_size)


def _message(config: RunConfig, machine: Machine) -> str:
    *_, last = _ways(config, machine, None)
    texts, would_fit = [], False
    for sweep in dict.fromkeys((WHOLE, last)):
        way = with_sweep(config, sweep)
        costs = machine.costs(way)
        texts.append(f"with layers {sweep} {shortage(costs, _given(way, machine))}")
        would_fit |= fits(costs)  # with the placement of states that needs least memory
    why = swept_refusal(config)
    texts += [f"layers cannot be swept: {why}"] if why else []
    states = "--offload-states auto, " if would_fit and config.memory.offload_states != "auto" else ""
    return (
        f"--offload-granularity auto finds no way that fits: {'; '.join(texts)}: use {states}a smaller "
        "--seq-length or --model, spread the run over more devices with --tp, --cp and --pp, or allow more with "
        "--device-memory-gib and --offload-host-memory-gib"
    )
