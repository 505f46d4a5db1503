"""What one rank of memo's own program takes of its device, as --device-memory-gb caps it (memo.estimate.own_memory).

On a GPU what torch does not see is with it. On a CPU the device is what torch's allocator is asked for: the process,
host records and the states in the host arena lie outside, and scratch memory of matrix products in bf16 and fp16, which
depends on the CPU, is not counted.
"""

from memo.config import RunConfig
from memo.estimate.own_memory import own_memory, worst_stages
from memo.spec.slots import Moved


def device_bytes(config: RunConfig, world_size: int, stage: int, moved: Moved | None = None) -> int:
    """Bytes of a rank of `stage`; `moved` by a swap plan, default: what a number in --offload-alpha moves.

    --offload-alpha auto without `moved` counts as off.
    """
    memory = own_memory(config, world_size, stage, moved=moved)
    return memory.total if config.hardware.device == "cuda" else memory.allocated


def least_device_bytes(config: RunConfig, world_size: int, stage: int) -> int:
    """The same; under --offload-alpha auto the lesser of everything on the device and as little as can be."""
    plain = device_bytes(config, world_size, stage)
    if config.memory.swaps and config.memory.offload_alpha == "auto":
        return min(plain, device_bytes(config, world_size, stage, moved={}))
    return plain


def worst_device_bytes(config: RunConfig, world_size: int) -> int:
    """Of the stage that needs most."""
    return max(least_device_bytes(config, world_size, stage) for stage in worst_stages(config))
