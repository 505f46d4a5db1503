"""Memory of one rank of memo's own program on a GPU, by the components of memo.estimate.rank_memory, Megatron-LM's.

What torch's allocator is asked for is counted request by request (memo.estimate.program), so nothing is fitted:

    weights .. state_slots   states, where the placement puts them
    rounding_buffers         slots of a swap plan
    skeletal                 what layers keep between forward and backward, but for the one at work
    transient                the rest of what lives at the worst moment of a step, cuBLAS's workspace with it
    context                  what torch does not see: CUDA's context, NCCL's buffers, cuDNN's workspace

Known error: allocated bytes within 0.3 % on the emulated GPU (benchmarks/full_size.py, docs/memory.md), where cuDNN's
workspaces do not show. context was not measured. What the allocator reserves beyond this depends on which it is
(docs/memory.md): with a plan of memo's 13 to 51 MiB, with expandable_segments 1 to 5 %, by default up to 20 %.
"""

from dataclasses import replace

from memo.config import RunConfig
from memo.config.derived import num_microbatches
from memo.estimate.memory import RUNTIME_BYTES
from memo.estimate.program.memory import program_memory
from memo.estimate.rank_memory import RankMemory
from memo.estimate.swap_memory import swap_bytes
from memo.spec.layer_ops import layers_in_flight
from memo.spec.slots import Moved


def own_memory(config: RunConfig, world_size: int, stage: int, *, moved: Moved | None = None) -> RankMemory:
    """Peak of the worst rank of pipeline stage `stage`, from the second step on.

    Args:
        config: checked, with a vocabulary and --device cuda.
        moved: what a swap plan moves; default: a number in --offload-alpha. auto without it counts as off.
    """
    if moved is None and config.memory.swaps and isinstance(config.memory.offload_alpha, str):
        config = replace(config, memory=replace(config.memory, offload_alpha="off"))
    if moved is None and config.memory.swaps:
        moved = float(config.memory.offload_alpha)
    program = program_memory(config, world_size, stage, moved)
    states, moment = program.states, program.moment
    kept = (layers_in_flight(config, num_microbatches(config, world_size), stage) - 1) * program.kept_bytes
    host = 0 if moved is None else swap_bytes(config, world_size, stage, moved).host
    return RankMemory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.masters + states.moments,
        state_slots=states.slots + states.staging,
        skeletal=kept,
        rounding_buffers=program.rounding_buffers,
        transient=moment.num_bytes - kept,
        communication=0,
        context=RUNTIME_BYTES["cuda"],
        host=host + states.host,
    )


def worst_own_rank(config: RunConfig, world_size: int, *, moved: Moved | None = None) -> RankMemory:
    """The stage with the highest total: the first, which has most in flight, or the last, which has the head."""
    ranks = [own_memory(config, world_size, stage, moved=moved) for stage in sorted({0, config.parallel.pp - 1})]
    return max(ranks, key=lambda rank: rank.total)
