"""Peak of allocated memory of one rank on a CPU in a training step, and what it consists of.

    states            weights, gradients, masters, moments: memo.estimate.cpu.states, to the byte
    state_slots       rounding buffers and staging of weights and gradients that come and go: to the byte
    rounding_buffers  slots of a swap plan and their workspace: memo.estimate.swap_memory, to the byte
    the moment        everything else that lives when most does: batches, activations, transients, messages

From the second step on: the first has no moments yet. What counts is what torch's CPU allocator is asked for; host
records of a swap plan and states in host memory are mapped past it. Scratch memory of matrix products in bf16 and fp16
depends on the CPU's model (memo.estimate.cpu.products): it is counted where the caller can measure it.

Known error: within 1 % of the measured peak, never more than 0.5 % below, in the runs of
benchmarks/memory_accuracy.py (torch 2.13, gloo). Sequences are taken as one document each.
"""

from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles
from memo.errors import ConfigError
from memo.estimate.cpu.ledger import Moment
from memo.estimate.cpu.products import Scratch, uncounted
from memo.estimate.cpu.sizes import layer_sizes
from memo.estimate.cpu.states import States, rank_states
from memo.estimate.cpu.step import Step
from memo.estimate.cpu.tiles import Slot
from memo.estimate.swap_memory import Moved, swap_bytes


@dataclass(frozen=True)
class CpuMemory:
    """Bytes of one rank at the peak of a step."""

    states: States
    rounding_buffers: int
    moment: Moment

    @property
    def total(self) -> int:
        return self.states.total + self.rounding_buffers + self.moment.num_bytes

    @property
    def components(self) -> dict[str, int]:
        """All bytes by name: states, buffers, then what lives at the moment, largest first."""
        states = self.states
        alive = dict(sorted(self.moment.alive.items(), key=lambda item: -item[1]))
        return {
            "weights": states.weights,
            "gradients": states.gradients,
            "masters": states.masters,
            "moments": states.moments,
            "state_slots": states.slots + states.staging,
            "rounding_buffers": self.rounding_buffers,
            **alive,
        }

    @property
    def main_components(self) -> dict[str, float]:
        """States and buffers, what takes at least a hundredth of the total, and all others as one."""
        components = self.components
        least = _MAIN_SHARE * self.total
        main = {name: float(n) for name, n in components.items() if n >= least or (n and name not in self.moment.alive)}
        return main | {"other": self.total - sum(main.values())}


_MAIN_SHARE = 0.01


def cpu_memory(
    config: RunConfig, world_size: int, stage: int, moved: Moved | None = None, scratch: Scratch = uncounted
) -> CpuMemory:
    """Peak of the worst rank of pipeline stage `stage`.

    Args:
        config: checked, with a vocabulary; its device counts as cpu. Attention has scratch memory, at most 1.5 MiB, for
            each of --num-threads; one is assumed where none is given.
        moved: what a swap plan moves; default: a number in --offload-alpha (off and full recomputation: none).
        scratch: bytes that a matrix product takes beside its result on the CPU that runs it.

    Raises ConfigError for --offload-alpha auto without `moved`: what moves is decided by measuring.
    """
    alpha = config.memory.offload_alpha
    if moved is None and config.memory.swaps:
        if isinstance(alpha, str):
            raise ConfigError(
                "--offload-alpha auto is decided by measuring, which needs the device: give off, or a number from "
                "0 to 1"
            )
        moved = alpha
    threads = config.hardware.num_threads or 1
    states = rank_states(config, world_size, stage)
    slot = None if moved is None else _slot(config, moved)
    buffers = 0 if moved is None else swap_bytes(config, world_size, stage, moved).rounding_buffers
    ring = layer_sizes(config, 0, threads).ring
    ranks = {0, ring - 1}  # those who see most keys of others, and those who are seen most
    moments = [
        Step(config, world_size, stage, layer_sizes(config, rank, threads, scratch), states, slot).run().peak
        for rank in ranks
    ]
    return CpuMemory(states, buffers, max(moments, key=lambda moment: moment.num_bytes))


def _slot(config: RunConfig, moved: Moved) -> Slot:
    """What backward finds of every tile: of a group that moves in part, one tile at least is recomputed."""
    tiles = resolved_offload_tiles(config)

    def whole(group: str) -> bool:
        if isinstance(moved, int | float):
            return moved >= 1
        return moved.get(group, 0) == tiles

    return Slot(qkv=whole("qkv"), residual=whole("residual"), fc1=whole("fc1"))
