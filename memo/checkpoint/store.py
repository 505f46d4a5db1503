"""Masters and moments of all ranks, to a checkpoint and back.

Every value is stored under the name and shape of the global tensor (`master/layers.0.mlp.fc1.weight`), so
a checkpoint loads into any layout. One that holds masters alone, as `memo import` writes it, loads with
moments of zero. What a directory of checkpoints looks like is in directory.py.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from memo.checkpoint.chunks import ChunkedTensor, global_chunks
from memo.checkpoint.directory import (
    LATEST,
    RunState,
    latest_checkpoint,
    partial,
    prepare,
    publish,
    read_state,
)
from memo.checkpoint.writer import InPlacePlanner, PiecewiseWriter
from memo.errors import CheckpointError
from memo.mesh import Mesh
from memo.parallel.data import MasterSegment

MASTER = "master/"
"""Before the global names of the weights; the moments stand beside them."""

SegmentState = tuple[MasterSegment, dict[str, Tensor]]
"""A segment and its 1-D tensors by kind: master, exp_avg, exp_avg_sq."""

T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def save_checkpoint(
    directory: str | Path,
    state: RunState,
    segments: Sequence[SegmentState],
    mesh: Mesh,
    *,
    group: ProcessGroup | None = None,
    on_read: Callable[[], None] = lambda: None,
) -> Path:
    """Write one checkpoint; collective over all ranks. Returns its directory.

    Args:
        group: of all ranks, for the messages of this save; default mesh.world. One for this alone lets it run
            in a thread beside training.
        on_read: called once this rank's tensors are on disk and may change. They are read where they lie:
            no copy is made of host memory, and of device memory MAX_FILE_BYTES at a time.

    Raises CheckpointError on every rank when any rank could not write; older checkpoints stay whole.
    """
    tensors = _state_dict(_written_here(segments, mesh))
    return write_tensors(directory, state, tensors, mesh, group=group, on_read=on_read)


def write_tensors(
    directory: str | Path,
    state: RunState,
    tensors: dict[str, Tensor],
    mesh: Mesh,
    flag: str = "--save",
    group: ProcessGroup | None = None,
    on_read: Callable[[], None] = lambda: None,
) -> Path:
    """As save_checkpoint, of tensors by kind and global name; `flag` is who is to blame for `directory`."""
    root = Path(directory)
    final = root / f"iter_{state.iteration:07d}"
    group = mesh.world if group is None else group
    try:
        from_rank_zero(lambda: prepare(final), mesh.rank, group)
        with _single_process_is_meant():
            save_tensors(
                tensors,
                storage_writer=PiecewiseWriter(partial(final), on_read),
                planner=InPlacePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        from_rank_zero(lambda: publish(final, state), mesh.rank, group)
    except (CheckpointException, Exception) as error:  # the first is only a BaseException
        if mesh.rank == 0:  # a full disk is not to stay full of what nobody can load
            shutil.rmtree(partial(final), ignore_errors=True)
        raise CheckpointError(
            f"{flag} {root}: iteration {state.iteration} could not be written ({_cause(error)}); "
            "older checkpoints there are untouched: free disk space or choose another directory"
        ) from error
    return final


def load_checkpoint(directory: str | Path, segments: Sequence[SegmentState], mesh: Mesh) -> RunState:
    """Fill the segments in place from the newest checkpoint under `directory`; collective over all ranks.

    Rank 0 says which that is and what it holds, for all: over a network's file system two nodes may see two.
    Raises CheckpointError, on every rank, when there is none, when it belongs to another model, or when
    it cannot be read.
    """
    tensors = _state_dict(segments)
    # All ranks judge by the tensors of all, so that none goes on alone into a collective.
    shapes = _gather_shapes(tensors, mesh)
    final, state, stored = from_rank_zero(lambda: _described(directory), mesh.rank, mesh.world)
    if all(name.startswith(MASTER) for name in stored):
        for _, kinds in segments:
            _zero_moments(kinds)
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(MASTER)}
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(MASTER)}
    _check_shapes(final, shapes, {name: entry.shape for name, entry in stored.items()})
    read_tensors(final, tensors, mesh)
    return state


def read_tensors(final: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    """Fill tensors, by kind and global name, from one checkpoint; collective. Raises CheckpointError."""
    try:
        with _single_process_is_meant():
            load_tensors(tensors, storage_reader=FileSystemReader(final), no_dist=mesh.world is None)
    except (CheckpointException, Exception) as error:
        raise CheckpointError(
            f"--load {final}: its tensors cannot be read ({_cause(error)}): "
            f"it is damaged, or not there for every node; write the number of an older one into {LATEST}"
        ) from error


def stored_tensors(final: Path) -> dict[str, StoredTensor]:
    """All tensors of one checkpoint by kind and global name. Raises CheckpointError."""
    try:
        metadata = FileSystemReader(final).read_metadata().state_dict_metadata
        return {
            name: StoredTensor(tuple(entry.size), entry.properties.dtype)  # type: ignore[union-attr]
            for name, entry in metadata.items()
        }
    except Exception as error:
        raise CheckpointError(
            f"--load {final}: its metadata cannot be read ({_cause(error)}): choose another checkpoint"
        ) from error


def from_rank_zero(action: Callable[[], T], rank: int, group: ProcessGroup | None) -> T:
    """What `action` returns on rank 0 of `group`, on every rank; what it raises there, too. None: a single process."""
    if group is None:
        return action()
    outcome: list[Any] = [None, None]
    if rank == 0:
        try:
            outcome[0] = action()
        except (OSError, CheckpointError) as error:
            outcome[1] = type(error)(str(error))  # without its traceback, which cannot travel
        except Exception as error:
            outcome[1] = RuntimeError(f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    value: T = outcome[0]
    return value


def _described(directory: str | Path) -> tuple[Path, RunState, dict[str, StoredTensor]]:
    final = latest_checkpoint(directory)
    return final, read_state(final), stored_tensors(final)


def _state_dict(segments: Sequence[SegmentState]) -> dict[str, Tensor]:
    """All rectangles of all segments, gathered under one ChunkedTensor for each global tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    chunks: dict[str, list[tuple[Sequence[int], Tensor]]] = {}
    for owner, kinds in segments:
        for kind, values in kinds.items():
            for name, (shape, parts) in global_chunks(owner.segment, owner.shard, values).items():
                key = f"{kind}/{name}"
                shapes[key] = shape
                chunks.setdefault(key, []).extend(parts)
    return {key: ChunkedTensor(shapes[key], parts, parts[0][1].dtype) for key, parts in chunks.items()}


def _written_here(segments: Sequence[SegmentState], mesh: Mesh) -> list[SegmentState]:
    """Of copies on several ranks one is written: the first tp rank's, the first stage's."""
    writes = {"": True, "tp": mesh.at.tp == 0, "embedding": mesh.is_first_stage}
    return [entry for entry in segments if writes[entry[0].shard.replicated]]


def _gather_shapes(tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Names and global shapes of what all ranks hold together."""
    mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if mesh.world is None:
        return mine
    everyone: list[Any] = [None] * mesh.grid.world_size
    dist.all_gather_object(everyone, mine)
    return {name: shape for part in everyone for name, shape in part.items()}


def _zero_moments(kinds: dict[str, Tensor]) -> None:
    for kind, values in kinds.items():
        if f"{kind}/" != MASTER:
            values.zero_()


def _check_shapes(final: Path, shapes: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError unless the checkpoint holds exactly these tensors."""
    flags = "give the model flags of the run that saved it"
    for name in sorted(shapes.keys() | stored.keys()):
        if name not in stored:
            raise CheckpointError(f"--load {final}: it holds no {name}, as it belongs to another model: {flags}")
        if name not in shapes:
            raise CheckpointError(
                f"--load {final}: it holds {name}, which this model lacks, as it belongs to another: {flags}"
            )
        if stored[name] != shapes[name]:
            raise CheckpointError(
                f"--load {final}: {name} has shape {stored[name]} there and {shapes[name]} in this model: {flags}"
            )


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without a process group torch warns that it assumes a single process, which is so.

    Filters belong to all threads: one that comes between could leave this message ignored, which is no loss.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: BaseException) -> str:
    """The first real error behind torch's collective exception, in one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
