"""Saves masters and moments of all ranks as a checkpoint, and loads them.

Every value is stored under the name and shape of its global tensor (`master/layers.0.mlp.fc1.weight`), so a checkpoint
loads into any layout. A checkpoint with masters only, as `memo import` writes it, loads with zero moments. directory.py
describes a directory of checkpoints.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.artifacts.checksum import checksum_of
from memo.artifacts.reading import read_bytes
from memo.artifacts.regular_file import replace_file
from memo.checkpoint.chunks import GlobalTensor, global_chunks
from memo.checkpoint.directory import check_names, newest_but, partial, prepare, publish, resolve_checkpoint
from memo.checkpoint.files import INDEX, RUN_STATE, DamagedError, checkpoint_file, damaged
from memo.checkpoint.index import MAX_BYTES as MAX_INDEX_BYTES
from memo.checkpoint.index import Index, StoredTensor, check_files, from_json, merged, to_json
from memo.checkpoint.reader import read_parts
from memo.checkpoint.run_state import RunState, read_sealed_state
from memo.checkpoint.writer import write_file
from memo.errors import CheckpointError, MemoError
from memo.mesh import Mesh
from memo.mesh.objects import from_rank_zero, of_all_ranks
from memo.parallel.collectives import group_rank
from memo.parallel.units import MasterSegment

MASTER = "master/"
"""The prefix of the global names of weights; moments have other prefixes."""

SegmentState = tuple[MasterSegment, dict[str, Tensor]]
"""A segment and its 1-D tensors by kind: master, exp_avg, exp_avg_sq."""


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

    With a `group` of all ranks for its own messages (default: mesh.world), a save can run in a thread while training
    goes on. Tensors are read in place: host memory is not copied, and device memory is copied a few MiB at a time.
    `on_read` is called once this rank's tensors have been read and may change.

    Raises CheckpointError on every rank if any rank cannot write; older checkpoints stay whole.
    """
    tensors = _state_dict(_written_here(segments, mesh))
    return write_tensors(directory, state, tensors, mesh.world if group is None else group, on_read=on_read)


def write_tensors(
    directory: str | Path,
    state: RunState,
    tensors: Mapping[str, GlobalTensor],
    group: ProcessGroup | None = None,
    flag: str = "--save",
    on_read: Callable[[], None] = lambda: None,
) -> Path:
    """Write one checkpoint of tensors by kind and global name, like save_checkpoint; `flag` names `directory`.

    `group`: all ranks that write; None: a single process.
    """
    root = Path(directory)
    final = root / f"iter_{state.iteration:07d}"
    from_rank_zero(lambda: check_names(root, flag), group)
    try:
        from_rank_zero(lambda: prepare(final), group)
        written = _written_by_all(partial(final), tensors, group, on_read)
        from_rank_zero(lambda: _complete(final, state, written), group)
    except Exception as error:
        if group_rank(group) == 0:  # an incomplete checkpoint must not fill the disk
            shutil.rmtree(partial(final), ignore_errors=True)
        raise CheckpointError(
            f"{flag} {root}: iteration {state.iteration} could not be written ({_cause(error)}); "
            "older checkpoints there are untouched: free disk space or choose another directory"
        ) from error
    return final


def _written_by_all(
    folder: Path, tensors: Mapping[str, GlobalTensor], group: ProcessGroup | None, on_read: Callable[[], None]
) -> list[Index | str]:
    """Write this rank's file; returns, on rank 0, the index of each rank's file or the reason why it failed."""
    rank = group_rank(group)
    outcome: Index | str
    try:
        outcome = write_file(folder / f"tensors-{rank:05d}.bin", tensors, on_read)
    except Exception as error:  # rank 0 reports it to all ranks in the next message, for which they wait
        outcome = _cause(error)
    if group is None:
        return [outcome]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(outcome, everyone if rank == 0 else None, dst=0, group=group)
    return everyone


def _complete(final: Path, state: RunState, written: Sequence[Index | str]) -> None:
    """Add the index of all ranks' files, and publish the checkpoint. Raises OSError or CheckpointError."""
    for outcome in written:
        if isinstance(outcome, str):
            raise CheckpointError(outcome)
    text = to_json(merged(outcome for outcome in written if not isinstance(outcome, str)))
    replace_file(partial(final) / INDEX, text)
    publish(final, state)


def load_checkpoint(
    directory: str | Path,
    segments: Sequence[SegmentState],
    mesh: Mesh,
    *,
    verify: bool = True,
    check: Callable[[RunState, bool], None] = lambda state, fits: None,
) -> RunState:
    """Fill the segments in place from the checkpoint that `directory` names (resolve_checkpoint); collective.

    Rank 0 resolves the name and reads the index for all ranks, because nodes may see different states of a network file
    system.

    Before anything is filled, `check` is called on rank 0 with the state, and whether its weights have the shapes of
    this model; its error is raised on all ranks.

    Raises CheckpointError on every rank if there is no checkpoint, if it belongs to another model, or if it cannot be
    read; segments may then be filled in part.
    """
    tensors = _state_dict(segments)
    # All ranks check the tensors of all ranks, so that all of them raise or none does.
    own_shapes = {name: tensor.shape for name, tensor in tensors.items()}
    shapes = {name: shape for part in of_all_ranks(own_shapes, mesh.world) for name, shape in part.items()}

    def described() -> tuple[Path, RunState, Index]:
        final = resolve_checkpoint(directory)
        state, index = open_checkpoint(final, verify=verify)
        stored = {name: tensor.shape for name, tensor in index.items()}
        there, here = ({k: v for k, v in each.items() if k.startswith(MASTER)} for each in (stored, shapes))
        check(state, there == here)
        return final, state, index

    final, state, index = from_rank_zero(described, mesh.world)
    if all(name.startswith(MASTER) for name in index):
        for moments in (values for _, kinds in segments for kind, values in kinds.items() if f"{kind}/" != MASTER):
            moments.zero_()
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(MASTER)}
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(MASTER)}
    check_shapes(f"--load {final}", shapes, index, "give the model flags of the run that saved it")
    read_tensors(final, index, tensors, mesh.world, verify=verify)
    return state


def open_checkpoint(final: Path, *, verify: bool = True) -> tuple[RunState, dict[str, StoredTensor]]:
    """The state of one checkpoint, and the index of its tensors; the files of tensors are checked but not read.

    Raises CheckpointError if a file is missing, damaged, cut short, or lies outside the directory.
    """
    try:
        state, index_checksum = read_sealed_state(final, verify=verify)
        content = read_bytes(checkpoint_file(final, INDEX), damaged(INDEX), max_bytes=MAX_INDEX_BYTES)
        if verify and checksum_of(content) != index_checksum:
            raise DamagedError(f"{INDEX} has another checksum than {RUN_STATE} says: one of the two is damaged")
        index = from_json(content)
        check_files(final, index)
    except (OSError, CheckpointError) as error:
        raise _unreadable(final, error) from None
    return state, index


def read_tensors(
    final: Path,
    index: Index,
    tensors: Mapping[str, GlobalTensor],
    group: ProcessGroup | None = None,
    *,
    verify: bool = True,
) -> None:
    """Fill tensors, by kind and global name, whose shapes are those of `index`; collective over `group`.

    Raises CheckpointError on every rank if any rank cannot read its part, or finds it damaged.
    """
    failure = None
    try:
        read_parts(final, index, tensors, verify=verify)
    except Exception as error:
        failure = str(_unreadable(final, error))
    raise_together(failure, group)


def raise_together(failure: str | None, group: ProcessGroup | None) -> None:
    """Raise the CheckpointError of the first rank that has one, on every rank; collective."""
    for message in of_all_ranks(failure, group):
        if message is not None:
            raise CheckpointError(message)


def _state_dict(segments: Sequence[SegmentState]) -> dict[str, GlobalTensor]:
    """All rectangles of all segments, gathered by global tensor."""
    found: dict[str, GlobalTensor] = {}
    for owner, kinds in segments:
        for kind, values in kinds.items():
            for name, tensor in global_chunks(owner.segment, owner.shard, values).items():
                known = found.setdefault(f"{kind}/{name}", tensor)
                if known is not tensor:
                    known.parts.extend(tensor.parts)
    return found


def _written_here(segments: Sequence[SegmentState], mesh: Mesh) -> list[SegmentState]:
    """The segments that this rank writes. The first tp rank, the first stage or rank 0 writes a parameter that several
    ranks hold."""
    writes = {"": True, "tp": mesh.at.tp == 0, "embedding": mesh.is_first_stage, "all": mesh.rank == 0}
    return [entry for entry in segments if writes[entry[0].shard.replicated]]


def check_shapes(where: str, shapes: Mapping[str, tuple[int, ...]], index: Index, remedy: str) -> None:
    """Raises CheckpointError unless a checkpoint holds exactly the tensors of a model, by name and shape."""
    for name in sorted(shapes.keys() | index.keys()):
        there, here = index[name].shape if name in index else (), shapes.get(name, ())
        if there != here:
            stored, needed = (f"shape {shape}" if shape else "no place" for shape in (there, here))
            raise CheckpointError(
                f"{where}: {name} has {stored} there and {needed} in this model, so it is of another: {remedy}"
            )


def _unreadable(final: Path, error: Exception) -> CheckpointError:
    """The error of a checkpoint that cannot be read; it names a checkpoint to load instead."""
    other = newest_but(final)
    remedy = f"give {other} instead, the newest other one there" if other else "there is no other one: restore a copy"
    if isinstance(error, DamagedError):
        remedy += ", or take it as it is with --no-verify-checkpoint"
    return CheckpointError(f"{final} cannot be read ({_cause(error)}): {remedy}")


def _cause(error: Exception) -> str:
    """An error in one line; the type is added unless it is an error of memo, which is a sentence."""
    lines = str(error).splitlines() or [""]
    return lines[0] if isinstance(error, MemoError) else f"{type(error).__name__}: {lines[0]}"
