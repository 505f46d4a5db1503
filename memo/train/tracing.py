"""Writes a trace of some training steps: the work of each stream, and the messages of each axis of the mesh."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from memo.executor.select import make_backend
from memo.executor.work import record_work
from memo.parallel.collectives import all_reduce
from memo.report.perfetto import write_perfetto
from memo.train.parallel_model import ParallelModel


def trace_steps(parts: ParallelModel, step: Callable[[], object], first_iteration: int, steps: int, path: Path) -> None:
    """Record `steps` calls of `step` on every rank, and write one file per rank; collective.

    All ranks count time from a message that they exchange before the first step.
    """
    mesh, swap = parts.mesh, parts.swap
    backend = swap.swapper.backend if swap is not None else make_backend("auto", parts.device)
    all_reduce(torch.zeros(1, device=parts.device), mesh.world)
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(record_work(mesh.watch, parts.chunks, backend, layers=swap is None))
        swaps = stack.enter_context(swap.recorded(work.origin)) if swap is not None else None
        for iteration in range(first_iteration, first_iteration + steps):
            with mesh.watch.work(f"step {iteration}"):
                step()
    spans = swaps.spans() if swaps is not None else []
    write_perfetto(spans, of_rank(path, mesh.rank, mesh.grid.world_size), mesh.rank, work.spans())


def of_rank(path: Path, rank: int, world_size: int) -> Path:
    """The file of one rank; if there are several ranks, the rank's number comes before the suffix."""
    return path if world_size == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
