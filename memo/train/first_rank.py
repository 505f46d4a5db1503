"""Work that rank 0 does before a run starts, while all other ranks wait."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from memo.config.parallel import ParallelConfig
from memo.mesh import init_distributed
from memo.mesh.objects import from_rank_zero
from memo.train.ending import shutdown

_PATIENCE_MINUTES = 24 * 60.0


def on_first_rank(action: Callable[[], None]) -> None:
    """Run `action` on rank 0; its error is raised on all ranks. The process group for it is ended afterwards."""
    world = init_distributed(torch.device("cpu"), ParallelConfig(distributed_timeout_minutes=_PATIENCE_MINUTES))
    try:
        from_rank_zero(action, dist.group.WORLD if world.size > 1 else None)
    finally:
        shutdown()
