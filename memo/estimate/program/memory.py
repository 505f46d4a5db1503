"""Peak of allocated memory of one rank in a training step of memo, by component.

    states            weights, gradients, masters, moments: memo.estimate.state_memory, to the byte
    state_slots       rounding buffers and staging buffers of weights and gradients in slots: to the byte
    rounding_buffers  slots of a swap plan, their workspace, and the store of keys and values where layers are swept:
                      memo.estimate.swap_memory, to the byte
    the moment        all other tensors that live at the peak: batches, activations, transients, messages

The peak holds from the second step on, as the first step has no optimizer moments yet. Requests to torch's allocator of
the device are counted; host records of a swap plan and states in host memory are mapped without this allocator. On CPUs
scratch memory of kernels is a stated bound, as it depends on the CPU. On GPUs cuBLAS has two workspaces for the whole
run.

Known error: at most 3 % above the measured peak and 0.5 % below it in the runs of benchmarks/memory_accuracy.py (CPU,
torch 2.13, gloo). For GPUs memo.estimate.memory_errors states the error (on the emulated GPU, NCCL, kernels of torch).
Each sequence is taken as one document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import ge, le
from typing import NamedTuple

from memo.config import ParallelConfig, RunConfig
from memo.config.derived import layer_tiles
from memo.errors import ConfigError
from memo.estimate.program.course import Course
from memo.estimate.program.embedding_and_loss import batch_bytes, end_sizes, order_bytes, rope_frequency_bytes
from memo.estimate.program.ledger import Ledger, Snapshot
from memo.estimate.program.passes import EndPasses, LayerPasses, end_passes, layer_passes
from memo.estimate.program.peaks import peak_bytes
from memo.estimate.program.reductions import Gradients, gradients_of
from memo.estimate.program.sizes import layer_sizes
from memo.estimate.program.step import Step
from memo.estimate.program.tiles import kept_by_layer
from memo.estimate.state_memory import StateBytes, placed_bytes, state_sizes
from memo.estimate.swap_memory import NO_SWAP, SwapBytes, laid_out_bytes
from memo.program.kinds import kind_of
from memo.spec.buckets import RankUnits, rank_units
from memo.spec.placement import placement_of
from memo.spec.slots import Moved, slot_layout
from memo.spec.stack import kinds_of_stage, runs_of_kinds
from memo.units import MIB

CUBLAS_WORKSPACES_BYTES = 2 * 32 * MIB
"""Workspaces that torch gives cuBLAS for a whole run on compute capability 9.0 and above; below it they are 2 x 8 MiB.

Each thread that multiplies has its own workspace: the thread that runs forward, and autograd's, which runs backward."""
_STEADY = 2
"""Microbatches after the warm-up until a schedule repeats itself; all further ones only add to the batch."""
_MAIN_SHARE = 0.01
"""Share of the total from which on a component is named on its own."""


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one rank at the peak of a step.

    Attributes:
        moment_bytes: bytes of the moment.
        kept_bytes: bytes that one layer keeps of one microbatch between forward and backward; part of the moment.
        step: all requests of the step; `moment` is computed from them on demand.
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
    def moment(self) -> Snapshot:
        return self.step.peak

    @property
    def components(self) -> dict[str, int]:
        """All bytes by name: states, buffers, then the tensors of the moment in order of size."""
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
        """Bytes of states, buffers and all tensors of at least a hundredth of the total; "other" sums up the rest."""
        components = self.components
        least = _MAIN_SHARE * self.total
        main = {name: float(n) for name, n in components.items() if n >= least or (n and name not in self.moment.alive)}
        return main | {"other": self.total - sum(main.values())}


class Rank(NamedTuple):
    """Arguments of a walk through a step, as in `Step`."""

    course: Course
    kinds: Sequence[LayerPasses]
    ends: EndPasses
    gradients: Gradients


class Program:
    """The step of a run, and its memory on each stage; memory that all stages share is counted once.

    Attributes:
        sizes, placement: sizes and placement of the states.
        slots: layout of the swap plan's slots; None without a swap plan.
        lasting: tensors that live during all of a step, besides states and rounding buffers.
    """

    def __init__(self, config: RunConfig, world_size: int, moved: Moved | None = None) -> None:
        """Arguments and errors as in `program_memory`."""
        alpha = config.memory.offload_alpha
        if moved is None and config.memory.swaps:
            if isinstance(alpha, str):
                raise ConfigError(
                    "--offload-alpha auto is decided by measuring, which needs the device: give off, or a number from "
                    "0 to 1"
                )
            moved = alpha
        self.config, self.world_size = config, world_size
        self.sizes, self.placement = state_sizes(config, world_size), placement_of(config, world_size)
        self.slots = None if moved is None else slot_layout(config, moved)
        runs, threads, tiles = runs_of_kinds(config), config.hardware.num_threads or 1, layer_tiles(config)
        of_kinds = [
            (layer_sizes(run, threads, tiles), kind_of(run.model), kept_by_layer(run, moved, tiles)) for run in runs
        ]
        # The sizes read below are the same for all kinds, except that a kind may have no RoPE.
        self.layer = layer = max((sizes for sizes, _, _ in reversed(of_kinds)), key=lambda sizes: sizes.rope)
        # Ranks of a ring differ in their attention calls; the first or the last rank needs most.
        self._ring_ranks = sorted({0, layer.ring - 1})
        self._kinds = [
            [
                layer_passes(sizes._replace(ring_rank=rank) if rank else sizes, kind, kept)
                for sizes, kind, kept in of_kinds
            ]
            for rank in self._ring_ranks
        ]
        self._rivals = _rivals(self._kinds)
        self._stages: dict[int, tuple[RankUnits, tuple[int, ...]]] = {}
        self._is_breadth_first = config.parallel.gradient_accumulation_order == "breadth_first"
        ends = end_sizes(config, layer)
        self._ends = end_passes(layer, ends, not self._is_breadth_first)
        self.lasting = Ledger(never=layer.never)
        self.lasting.make("batch", self.sizes.microbatches * batch_bytes(layer))
        self.lasting.make("order of tokens", order_bytes(layer))
        self.lasting.make("cuBLAS workspaces", CUBLAS_WORKSPACES_BYTES if layer.on_cuda else 0)
        if layer.rope:
            frequencies = rope_frequency_bytes(layer, ends.rotations)
            self.lasting.make("rope frequencies", config.parallel.vpp * frequencies)

    def states(self, stage: int) -> StateBytes:
        return placed_bytes(self._stage(stage)[0], self.placement, self.sizes)

    def swap(self, stage: int) -> SwapBytes:
        return NO_SWAP if self.slots is None else laid_out_bytes(self.config, self.world_size, stage, self.slots)

    def kept_bytes(self, stage: int) -> int:
        """Return the most bytes that one layer keeps of one microbatch between forward and backward."""
        return max(self._kinds[0][kind].between.num_bytes for kind in {*self._stage(stage)[1]})

    def peak_bytes(self, stage: int) -> int:
        """Return the peak bytes of a step, without states and rounding buffers, on the stage's rank that needs most."""
        if not self.layer.on_cuda:
            return self.walk(stage).peak_bytes
        ranks = self.ranks(stage)
        return self.lasting.live_bytes + max(peak_bytes(*ranks[place]) for place in self._rivals)

    def worst_ring_rank(self, stage: int) -> int:
        """Return the place in a ring of cp of the stage's rank that needs most; on GPUs."""
        return max(zip(self.ranks(stage), self._ring_ranks, strict=True), key=lambda each: peak_bytes(*each[0]))[1]

    def walk(self, stage: int) -> Ledger:
        """Return all requests of the rank of a stage that needs most."""
        found = []
        for rank in self.ranks(stage):
            ledger = self.lasting.copy()
            found.append(Step(ledger, *rank, self._gathered(rank.course, stage)).run())
        return max(found, key=lambda ledger: ledger.peak_bytes)

    def ranks(self, stage: int) -> list[Rank]:
        """Return the ranks of a stage that may need most: one of them does."""
        parallel, sizes, (units, kinds) = self.config.parallel, self.sizes, self._stage(stage)
        has_ends = stage == 0, stage == parallel.pp - 1
        gradients = gradients_of(units, kinds, len(self._kinds[0]), has_ends, self.placement, sizes)
        passes = self._kinds[0][kinds[0]]
        course = Course(
            parallel.pp,
            parallel.vpp,
            stage,
            sizes.microbatches if self._is_breadth_first else _walked(sizes.microbatches, parallel, stage),
            self._is_breadth_first,
            kinds,
            passes.in_place,
            passes.keeps_input,
            self.placement,
            sizes.shards > 1,
            parallel.shards_gradients,
            parallel.overlap_grad_reduce,
            tuple(module is not None for module in (*gradients.layers, gradients.embedding, gradients.head)),
            passes.backward.tail is not None,
            self.layer.on_cuda,
        )
        return [Rank(course, kinds_of_rank, self._ends, gradients) for kinds_of_rank in self._kinds]

    def _stage(self, stage: int) -> tuple[RankUnits, tuple[int, ...]]:
        """Return the units of a stage, and the kinds of its layers."""
        if stage not in self._stages:
            parallel = self.config.parallel
            kinds = kinds_of_stage(self.config.model, parallel.pp, parallel.vpp, stage)
            self._stages[stage] = rank_units(self.config, self.world_size, stage), kinds
        return self._stages[stage]

    def _gathered(self, course: Course, stage: int) -> dict[int, int]:
        """Return the bytes of gloo's copies by layer, for layers on a CPU whose weights are gathered into a slot."""
        if self.layer.on_cuda or self.sizes.shards == 1:
            return {}
        owners = [owner for owner in range(course.num_modules) if course.is_layer(owner)]
        units = zip(owners, self._stage(stage)[0].layers, strict=True)
        return {
            owner: unit.weights * self.layer.narrow for owner, unit in units if course.places(owner).weights_in_slot
        }


def _rivals(ranks: Sequence[Sequence[LayerPasses]]) -> Sequence[int]:
    """Return the places of the first and the last of some ranks, without one whose passes all need no more bytes."""
    first, last = (sum((passes.numbers for passes in kinds), ()) for kinds in (ranks[0], ranks[-1]))
    if all(map(ge, first, last)):
        return (0,)
    return (-1,) if all(map(le, first, last)) else (0, -1)


def _walked(microbatches: int, parallel: ParallelConfig, stage: int) -> int:
    """Return the number of microbatches after which a schedule repeats itself."""
    warm_up = parallel.pp - stage if parallel.vpp == 1 else 2 * parallel.pp
    return min(microbatches, warm_up + (_STEADY if parallel.vpp == 1 else 0))


def program_memory(config: RunConfig, world_size: int, stage: int, moved: Moved | None = None) -> ProgramMemory:
    """Return the peak memory of the rank of pipeline stage `stage` that needs most.

    Args:
        config: a checked configuration with a vocabulary; --device auto counts as cpu. On a CPU attention has scratch
            memory, at most 1.5 MiB, for each of --num-threads; without that flag one thread is assumed.
        moved: what a swap plan moves; by default what a number in --offload-alpha moves.

    Raises ConfigError for --offload-alpha auto without `moved`: what moves is decided by measuring.
    """
    program = Program(config, world_size, moved)
    walked = program.walk(stage)
    buffers = program.swap(stage).rounding_buffers
    return ProgramMemory(program.states(stage), buffers, walked.peak_bytes, program.kept_bytes(stage), walked)
