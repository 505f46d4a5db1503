"""Checks that every master and moment is finite before a checkpoint is written."""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from memo.checkpoint.chunks import global_chunks
from memo.checkpoint.store import SegmentState
from memo.errors import DivergenceError
from memo.mesh.objects import of_all_ranks


def check_finite(segments: Sequence[SegmentState], iteration: int, group: ProcessGroup | None) -> None:
    """Raises DivergenceError on every rank of `group` if any value is not finite, naming its tensor; collective.

    It reads all values once without a copy, and waits for the device.
    """
    found = of_all_ranks(_first_not_finite(segments), group)
    names = [f"{name} on rank {rank}" for rank, name in enumerate(found) if name is not None]
    if names:
        more = f" and of {len(names) - 1} more ranks" if len(names) > 1 else ""
        raise DivergenceError(
            f"iteration {iteration} is not saved, because values of {names[0]}{more} are not finite; older checkpoints "
            "are untouched: go on from one with --load, with a lower --lr, or after a look at the data since then"
        )


def _first_not_finite(segments: Sequence[SegmentState]) -> str | None:
    tensors = [(owner, kind, values) for owner, kinds in segments for kind, values in kinds.items()]
    for device in {values.device for _, _, values in tensors}:
        here = [entry for entry in tensors if entry[2].device == device]
        # aminmax returns NaN if any value is NaN, and allocates no tensor of the size of its input.
        extremes = torch.stack([torch.stack(torch.aminmax(values)) for _, _, values in here])
        flags = extremes.isfinite().all(dim=1).tolist()
        for (owner, kind, values), is_finite in zip(here, flags, strict=True):
            if not is_finite:
                names = [
                    name
                    for name, tensor in global_chunks(owner.segment, owner.shard, values).items()
                    if not all(part.values().isfinite().all() for part in tensor.parts)
                ]
                return f"{kind}/{(names or [owner.segment.range.name])[0]}"
    return None
