"""Nothing that is not finite is ever published: a look at every master and moment before it is written."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.checkpoint.chunks import global_chunks
from memo.checkpoint.store import SegmentState
from memo.errors import DivergenceError
from memo.mesh import Mesh


def check_finite(
    segments: Sequence[SegmentState], iteration: int, mesh: Mesh, group: ProcessGroup | None = None
) -> None:
    """Raises DivergenceError, on every rank, that names the first such tensor of each rank; collective over `group`.

    Reads everything once and makes no copy; waits for the device. `group`: of all ranks, default mesh.world.
    """
    group = mesh.world if group is None else group
    mine = _first_not_finite(segments)
    found = [mine]
    if group is not None:
        found = [None] * mesh.grid.world_size
        dist.all_gather_object(found, mine, group=group)
    told = [f"{name} on rank {rank}" for rank, name in enumerate(found) if name is not None]
    if told:
        more = f" and of {len(told) - 1} more ranks" if len(told) > 1 else ""
        raise DivergenceError(
            f"iteration {iteration} is not saved, because values of {told[0]}{more} are not finite; older checkpoints "
            "are untouched: go on from one with --load, with a lower --lr, or after a look at the data since then"
        )


def _first_not_finite(segments: Sequence[SegmentState]) -> str | None:
    tensors = [(owner, kind, values) for owner, kinds in segments for kind, values in kinds.items()]
    for device in {values.device for _, _, values in tensors}:
        here = [entry for entry in tensors if entry[2].device == device]
        # NaN is the extreme of all that hold one, and no tensor of their size is made.
        extremes = torch.stack([torch.stack(torch.aminmax(values)) for _, _, values in here])
        flags = extremes.isfinite().all(dim=1).tolist()
        for (owner, kind, values), is_finite in zip(here, flags, strict=True):
            if not is_finite:
                names = [
                    name
                    for name, (_, parts) in global_chunks(owner.segment, owner.shard, values).items()
                    if any(_has_not_finite(part) for _, part in parts)
                ]
                return f"{kind}/{(names or [owner.segment.slot.name])[0]}"
    return None


def _has_not_finite(values: Tensor) -> bool:
    return not bool(values.isfinite().all())
