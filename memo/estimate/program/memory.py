"""Peak of allocated memory of one rank in a training step of memo, and what it consists of.

    states            weights, gradients, masters, moments: memo.estimate.state_memory, to the byte
    state_slots       rounding buffers and staging buffers of weights and gradients in slots: to the byte
    rounding_buffers  slots of a swap plan, their workspace, and the store of keys and values where layers are swept:
                      memo.estimate.swap_memory, to the byte
    the moment        all else that lives when a step needs most: batches, activations, transients, messages

This holds from the second step on, as the first has no optimizer moments yet. Counted are the requests to torch's
allocator of the device; host records of a swap plan and states in host memory are mapped without it. On CPUs scratch
memory of kernels is a stated bound, as it depends on the CPU. On GPUs cuBLAS has two workspaces for the whole run.

Known error: at most 3 % above the measured peak and 0.5 % below in the runs of benchmarks/memory_accuracy.py (CPU,
torch 2.13, gloo), and on GPUs that of memo.estimate.memory_errors (on the emulated GPU, NCCL, kernels of torch).
Sequences are taken as one document each.
"""

from dataclasses import dataclass, field
from functools import cached_property

from memo.config import RunConfig
from memo.config.derived import ring_size
from memo.errors import ConfigError
from memo.estimate.program.ledger import Ledger, Moment
from memo.estimate.program.state_layout import state_layout
from memo.estimate.program.step import Step
from memo.estimate.state_memory import StateBytes, state_bytes
from memo.estimate.swap_memory import swap_bytes
from memo.spec.slots import Moved

_MAIN_SHARE = 0.01
"""Share of the total from which on a component is named on its own."""


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one rank at the peak of a step.

    Attributes:
        moment_bytes: bytes of the moment.
        kept_bytes: what one layer keeps of one microbatch between its forward and its backward; part of the moment.
        step: all requests of the step, from which `moment` is computed on demand.
    """

    states: StateBytes
    rounding_buffers: int
    moment_bytes: int
    kept_bytes: int
    step: Ledger = field(repr=False)

    @property
    def total(self) -> int:
        return self.states.device + self.rounding_buffers + self.moment_bytes

    @cached_property
    def moment(self) -> Moment:
        return self.step.peak

    @property
    def components(self) -> dict[str, int]:
        """All bytes by name: states, buffers, then what lives at the moment, in order of size."""
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
        """States, buffers and what takes at least a hundredth of the total by name; "other" is the sum of the rest."""
        components = self.components
        least = _MAIN_SHARE * self.total
        main = {name: float(n) for name, n in components.items() if n >= least or (n and name not in self.moment.alive)}
        return main | {"other": self.total - sum(main.values())}


def program_memory(config: RunConfig, world_size: int, stage: int, moved: Moved | None = None) -> ProgramMemory:
    """Peak memory of the rank of pipeline stage `stage` that needs most.

    Args:
        config: a checked configuration with a vocabulary; --device auto counts as cpu. On a CPU attention has scratch
            memory, at most 1.5 MiB, for each of --num-threads; without that flag one thread is assumed.
        moved: what a swap plan moves; by default what a number in --offload-alpha moves.

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
    buffers = 0 if moved is None else swap_bytes(config, world_size, stage, moved).rounding_buffers
    layout = state_layout(config, world_size, stage)
    ranks = {0, ring_size(config) - 1}  # ranks of a ring differ in their attention calls; one of these two needs most
    steps = [Step(config, world_size, stage, rank, layout, moved) for rank in ranks]
    kept_bytes = steps[0].kept_bytes
    # Usually one of the two needs no less than the other at any moment, so that its walk is enough.
    enough = next((step for step in steps if all(map(step.needs_no_less_than, steps))), None)
    walked = steps if enough is None else [enough]
    worst = max((step.run() for step in walked), key=lambda ledger: ledger.peak_bytes)
    return ProgramMemory(state_bytes(config, world_size, stage), buffers, worst.peak_bytes, kept_bytes, worst)
