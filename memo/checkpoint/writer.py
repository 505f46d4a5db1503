"""How tensors become files: read where they lie, in files of a bounded size."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from memo.units import GIB

MAX_FILE_BYTES = 2 * GIB
"""Of one file, unless a single rectangle is larger. Tensors of a device lie in host memory, once, while their file is
written: this bounds how many. Tensors of host memory are never copied."""


class InPlacePlanner(DefaultSavePlanner):
    """Hands out tensors of host memory as they lie there.

    torch.save writes the whole storage of a view, so torch clones views first, and keeps the clones of a file until
    it is closed. A tensor whose storage begins and ends where the view does needs no clone.
    """

    def resolve_data(self, write_item: WriteItem) -> Any:
        """A CPU tensor with a storage of its own extent, sharing memory with what is saved if that is on the CPU.

        One from a device is copied on the current stream, and has arrived when this returns.
        """
        data = super().resolve_data(write_item)
        return _with_exact_storage(data.detach().cpu()) if isinstance(data, Tensor) else data


def _with_exact_storage(values: Tensor) -> Tensor:
    """The same memory (a copy if it is not contiguous) under a storage of exactly values.nbytes."""
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    flat = values.contiguous().view(-1)
    # As bytes, because NumPy does not know all of torch's dtypes.
    return torch.frombuffer(flat.view(torch.uint8).numpy(), dtype=values.dtype).view(values.shape)


class PiecewiseWriter(FileSystemWriter):
    """Writes a rank's tensors into several files one after another, each on disk before the next begins.

    `on_read` is called once all are: from then on the tensors may change. Names the operating system's error where
    torch's own clean-up hides it behind a later one.
    """

    def __init__(self, path: Any, on_read: Callable[[], None]) -> None:
        super().__init__(path)
        self.on_read = on_read

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        try:
            for part in _parts(plan):
                results += super().write_data(part, planner).wait()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None
        self.on_read()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _parts(plan: SavePlan) -> Iterator[SavePlan]:
    """The plan as several of about MAX_FILE_BYTES, each with a prefix of its own for the names of its files."""
    parts: list[list[WriteItem]] = [[]]
    free_bytes = MAX_FILE_BYTES
    for item in plan.items:
        assert item.tensor_data is not None
        num_bytes = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if parts[-1] and num_bytes > free_bytes:
            parts.append([])
            free_bytes = MAX_FILE_BYTES
        parts[-1].append(item)
        free_bytes -= num_bytes
    for i, items in enumerate(parts):
        prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{i}_") if i else plan.storage_data
        yield replace(plan, items=items, storage_data=prefix)
