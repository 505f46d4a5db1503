"""Peak of allocated memory of one rank in a training step of memo's own program, and what it consists of.

    states            weights, gradients, masters, moments: memo.estimate.program.states, to the byte
    state_slots       rounding buffers and staging of weights and gradients that come and go: to the byte
    rounding_buffers  slots of a swap plan and their workspace: memo.estimate.swap_memory, to the byte
    the moment        everything else that lives when most does: batches, activations, transients, messages

From the second step on: the first has no moments yet. What counts is what torch's allocator of the device is asked
for; host records of a swap plan and states in host memory are mapped past it. On CPUs, scratch memory of matrix
products in bf16 and fp16 depends on the model (memo.estimate.program.products): it is counted where the caller can
measure it. On GPUs cuBLAS has one workspace for the whole run.

Known error: within 1 % of the measured peak, never more than 0.5 % below, in the runs of
benchmarks/memory_accuracy.py (CPU, torch 2.13, gloo) and of benchmarks/full_size.py (CUDA, on the emulated GPU, NCCL,
kernels of torch). Sequences are taken as one document each.
"""

from dataclasses import dataclass, field
from functools import cached_property

from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles
from memo.errors import ConfigError
from memo.estimate.program.ledger import Ledger, Moment
from memo.estimate.program.products import Scratch, uncounted
from memo.estimate.program.sizes import layer_sizes
from memo.estimate.program.states import States, rank_states
from memo.estimate.program.step import Step
from memo.estimate.program.tiles import slot_of
from memo.estimate.swap_memory import swap_bytes
from memo.spec.slots import Moved


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one rank at the peak of a step.

    Attributes:
        moment_bytes: of the moment.
        kept_bytes: of one layer and microbatch, between its forward and its backward; a part of the moment.
        step: all requests, from which the moment is put together when it is asked for.
    """

    states: States
    rounding_buffers: int
    moment_bytes: int
    kept_bytes: int
    step: Ledger = field(repr=False)

    @property
    def total(self) -> int:
        return self.states.total + self.rounding_buffers + self.moment_bytes

    @cached_property
    def moment(self) -> Moment:
        return self.step.peak

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


def program_memory(
    config: RunConfig, world_size: int, stage: int, moved: Moved | None = None, scratch: Scratch = uncounted
) -> ProgramMemory:
    """Peak of the worst rank of pipeline stage `stage`.

    Args:
        config: checked, with a vocabulary; --device auto counts as cpu. There attention has scratch memory, at most
            1.5 MiB, for each of --num-threads; one is assumed where none is given.
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
    slot = None if moved is None else slot_of(moved, resolved_offload_tiles(config))
    buffers = 0 if moved is None else swap_bytes(config, world_size, stage, moved).rounding_buffers
    ring = layer_sizes(config, 0, threads).ring
    ranks = {0, ring - 1}  # those who see most keys of others, and those who are seen most
    sizes = [layer_sizes(config, rank, threads, scratch) for rank in ranks]
    steps = [Step(config, world_size, stage, z, states, slot) for z in sizes]
    kept_bytes = steps[0].kept_bytes
    # As a rule one rank has no less of anything than the other, so the walk of one is enough.
    enough = next((step for step in steps if all(map(step.needs_no_less_than, steps))), None)
    walked = steps if enough is None else [enough]
    worst = max((step.run() for step in walked), key=lambda ledger: ledger.peak_bytes)
    return ProgramMemory(states, buffers, worst.peak_bytes, kept_bytes, worst)
