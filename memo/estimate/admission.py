"""Refuses a run that cannot fit or finish, before it allocates anything.

The estimates have errors (see memo.estimate.memory_account and estimate_step_s): a run near the limit may be admitted
and fail, or be refused although it would just fit. Under --offload-alpha auto a run is admitted if it fits either with
all activations on the device or with as few as possible. On a CPU, device and host share one memory; there
--device-memory-gib limits the bytes that torch allocates (memo.estimate.program).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import num_microbatches, sequence_step
from memo.errors import ResourceError
from memo.estimate.memory_account import possible_memory, worst_device_bytes
from memo.estimate.node_memory import most_of_a_node, node_host_bytes
from memo.estimate.rank_memory import RankMemory, components
from memo.estimate.unseen_memory import FAST_NODE, Links
from memo.spec.flops import step_flops
from memo.spec.placement import StatePlacement, with_placement
from memo.units import GIB, format_bytes, format_duration_s

EFFICIENCY = 0.5
"""Share of the peak that a rank reaches while it computes."""


@dataclass(frozen=True)
class Admission:
    """The expected memory and time of an admitted run.

    Attributes:
        worst_rank: memory of the rank that needs most.
        shared_bytes: bytes of all ranks that share one memory.
        step_s: seconds of one step.
    """

    worst_rank: RankMemory
    shared_bytes: int
    step_s: float


class Room(NamedTuple):
    """The memory that is free for a run, and the links of its node.

    Attributes:
        available_bytes: free bytes of one memory: the node's on CPU (`available_host_bytes`), one device's on CUDA.
        total_bytes: size of that memory, including the part that other processes hold.
        local_ranks: ranks that share that memory: those of the node on CPU, 1 on CUDA.
        host_bytes: host memory that activations and states of the `host_ranks` ranks of a node may take; None: it is
            not checked.
        links: links between the GPUs.
    """

    available_bytes: int
    total_bytes: int
    local_ranks: int = 1
    host_bytes: int | None = None
    host_ranks: int = 1
    links: Links = FAST_NODE


def admit(config: RunConfig, world_size: int, room: Room, peak_flops: float) -> Admission:
    """Estimate a checked run; raises ResourceError if it needs more memory or time than there is.

    Args:
        peak_flops: peak of one rank, FLOP/s.
    """
    machine = _machine(config, world_size, room, peak_flops)
    room, admission = machine.room, machine.estimate(config)
    limit_s = 60.0 * config.training.max_step_minutes
    fits = admission.shared_bytes <= room.available_bytes
    if fits and admission.step_s <= limit_s:
        _check_cap(config, machine)
        _check_host(config, machine)
        return admission
    memory, step_s = admission.worst_rank, format_duration_s(admission.step_s)
    sizes = components(memory).items()
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes if name != "host" or size)
    within = "within" if admission.step_s <= limit_s else "above"
    if not fits and admission.shared_bytes <= room.total_bytes:
        cause = "this run does not fit in the memory that is free"
        remedy = (
            f"other processes hold {format_bytes(room.total_bytes - room.available_bytes)} of "
            f"{format_bytes(room.total_bytes)}: end some of them, or wait until "
            f"{format_bytes(admission.shared_bytes)} are free"
        )
    else:
        cause = f"--seq-length {config.data.seq_length} is too {'slow' if fits else 'large'} for this machine"
        remedy = _remedy(config, machine, only_time=fits)
    raise ResourceError(
        f"{cause}: a rank needs {format_bytes(machine.needed_bytes(memory))} ({parts}); the ranks that share this "
        f"memory ({room.local_ranks}) need {format_bytes(admission.shared_bytes)}, available are "
        f"{format_bytes(room.available_bytes)}; one step takes about {step_s}, {within} --max-step-minutes "
        f"{config.training.max_step_minutes:g}: {remedy}"
    )


def would_hold(config: RunConfig, world_size: int, room: Room) -> bool:
    """Whether `admit` would find enough memory, however long a step takes."""
    return _machine(config, world_size, room, 1.0).holds(config)


def estimate_step_s(config: RunConfig, world_size: int, peak_flops: float) -> float:
    """Seconds of one step, from FLOPs alone; `peak_flops` is the peak of one rank in FLOP/s.

    The pipeline idles for (pp - 1) / (microbatches x vpp) of its working time (Narayanan et al., 2021).

    Known error: EFFICIENCY stands for everything that is not a matrix product, communication included. Long sequences
    on a data-centre GPU reach 0.5 (MEMO, table 3); tiny models and slow links take several times as long.
    """
    parallel = config.parallel
    working_s = step_flops(config, world_size) / (world_size * EFFICIENCY * peak_flops)
    bubble = (parallel.pp - 1) / (num_microbatches(config, world_size) * parallel.vpp)
    return working_s * (1.0 + bubble)


@dataclass(frozen=True)
class _Machine:
    """The memory and speed of the machine; see the arguments of `admit`.

    Attributes:
        cap_bytes: --device-memory-gib where it limits torch's memory on a CPU; on a GPU it limits `room`.
    """

    world_size: int
    room: Room
    peak_flops: float
    is_gpu: bool
    cap_bytes: int | None

    def needed_bytes(self, memory: RankMemory) -> int:
        """Bytes of the memory that ranks share. On a CPU it also holds host records and the states in host memory."""
        return memory.total + (0 if self.is_gpu else memory.host)

    def estimate(self, config: RunConfig) -> Admission:
        choices = (
            possible_memory(config, self.world_size, stage, self.room.links) for stage in range(config.parallel.pp)
        )
        # Which stages share a node depends on the launcher: assume the most demanding ranks do.
        stages = sorted((min(each, key=self.needed_bytes) for each in choices), key=self.needed_bytes, reverse=True)
        needed = [self.needed_bytes(memory) for memory in stages]
        shared = most_of_a_node(needed, self.world_size // config.parallel.pp, self.room.local_ranks)
        return Admission(stages[0], shared, estimate_step_s(config, self.world_size, self.peak_flops))

    def holds(self, config: RunConfig) -> bool:
        """Whether a run fits both on its devices and in host memory."""
        cap = self.cap_bytes
        return (
            self.estimate(config).shared_bytes <= self.room.available_bytes
            and (cap is None or worst_device_bytes(config, self.world_size) <= cap)
            and (self.room.host_bytes is None or self.needed_on_host(config) <= self.room.host_bytes)
        )

    def needed_on_host(self, config: RunConfig) -> int:
        alpha = config.memory.offload_alpha
        moved = alpha if config.memory.swaps and isinstance(alpha, float) else None
        return node_host_bytes(config, self.world_size, self.room.host_ranks, moved)


def _machine(config: RunConfig, world_size: int, room: Room, peak_flops: float) -> _Machine:
    given, is_gpu = config.memory.device_memory_gib, config.hardware.device == "cuda"
    cap = None if given is None else int(given * GIB)
    if is_gpu and cap is not None:
        room = room._replace(available_bytes=min(room.available_bytes, cap), total_bytes=min(room.total_bytes, cap))
    return _Machine(world_size, room, peak_flops, is_gpu, None if is_gpu else cap)


def _check_cap(config: RunConfig, machine: _Machine) -> None:
    cap = machine.cap_bytes
    if cap is None:
        return
    needed = worst_device_bytes(config, machine.world_size)
    if needed > cap:
        raise ResourceError(
            f"--device-memory-gib {config.memory.device_memory_gib:g} is too little: a rank takes "
            f"{format_bytes(needed)} ({needed} bytes) of its device, {cap} bytes are allowed: "
            + _states_remedy(config, machine)
            + f"give {needed / GIB:.3f} GiB, use a smaller --seq-length, or choose a smaller --model"
        )


def _check_host(config: RunConfig, machine: _Machine) -> None:
    room = machine.room
    if room.host_bytes is None:
        return
    needed = machine.needed_on_host(config)
    if needed > room.host_bytes:
        raise ResourceError(
            f"--offload-states {config.memory.offload_states} takes {format_bytes(needed)} of host memory on a node of "
            f"{room.host_ranks} ranks, {format_bytes(room.host_bytes)} are available: "
            f"{_states_remedy(config, machine)}"
            "raise --offload-host-memory-gib if the node has more, or use more nodes"
        )


def _remedy(config: RunConfig, machine: _Machine, only_time: bool) -> str:
    limit_s = 60.0 * config.training.max_step_minutes

    def is_within(seq_length: int) -> bool:
        estimate = machine.estimate(replace(config, data=replace(config.data, seq_length=seq_length)))
        return estimate.shared_bytes <= machine.room.available_bytes and estimate.step_s <= limit_s

    step = sequence_step(config.parallel.tp, config.parallel.cp)
    longer = "raise --max-step-minutes, " if only_time else _states_remedy(config, machine)
    spread = "spread the run over more devices with --tp, --cp and --pp"
    low, high = 0, config.data.seq_length // step  # in steps; `low` fits (0 if nothing does), `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle * step) else (low, middle)
    if low == 0:
        return f"no sequence length fits: {longer}{spread}, or choose a smaller --model"
    return f"use --seq-length {low * step} or less, {longer}or {spread}"


def _states_remedy(config: RunConfig, machine: _Machine) -> str:
    """Advice to use --offload-states auto if some placement fits; "" if none does or the flag is given already.

    Tried are the placements with the least device memory, with and without the copy of the weights.
    """
    if config.memory.offload_states == "auto":
        return ""
    layers = config.model.num_layers // config.parallel.pp
    least = (StatePlacement(layers, layers, layers, layers, weight_copy=copy) for copy in (True, False))
    fits = any(machine.holds(with_placement(config, placement)) for placement in least)
    return "use --offload-states auto, " if fits else ""
