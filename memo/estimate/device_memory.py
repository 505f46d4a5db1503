"""Device memory of one rank of memo as --device-memory-gib limits it (memo.estimate.own_memory).

On a GPU this includes what torch does not see. On a CPU it is what torch's allocator is asked for. The process, host
records and the states in the host arena are not part of that, and the scratch memory of matrix products in bf16 and
fp16, which depends on the CPU, is not counted.
"""

from memo.config import RunConfig
from memo.estimate.own_memory import own_memory, possible_memory, worst_stages
from memo.estimate.rank_memory import RankMemory
from memo.spec.slots import Moved


def device_bytes(config: RunConfig, world_size: int, stage: int, moved: Moved | None = None) -> int:
    """Bytes of a rank of `stage`; `moved` is what a swap plan moves, by default what a number in --offload-alpha moves.

    --offload-alpha auto without `moved` counts as off.
    """
    return _on_device(config, own_memory(config, world_size, stage, moved=moved))


def worst_device_bytes(config: RunConfig, world_size: int) -> int:
    """Bytes of the rank that needs most, over all stages; under --offload-alpha auto the least that it can do with."""
    return max(
        min(_on_device(config, memory) for memory in possible_memory(config, world_size, stage))
        for stage in worst_stages(config)
    )


def _on_device(config: RunConfig, memory: RankMemory) -> int:
    return memory.total if config.hardware.device == "cuda" else memory.allocated
