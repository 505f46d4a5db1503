"""Checkpoints on disk: written aside, then renamed, so that the last whole one always stays.

    DIR/iter_0000100/                          torch.distributed.checkpoint files and run_state.json
    DIR/latest_checkpointed_iteration.txt      Megatron's name for the pointer to the newest

Every value is stored under the name and shape of the global tensor (`master/layers.0.mlp.fc1.weight`), so
a checkpoint loads into any layout. One that holds masters alone, as `memo import` writes it, loads with
moments of zero.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from memo.checkpoint.chunks import ChunkedTensor, global_chunks
from memo.errors import CheckpointError
from memo.mesh import Mesh
from memo.parallel.data import MasterSegment
from memo.units import GIB

LATEST = "latest_checkpointed_iteration.txt"
SCHEMA_VERSION = 1
MAX_FILE_BYTES = 2 * GIB
"""Of one file; as much may lie in host memory while it is written."""
MASTER = "master/"
"""Before the global names of the weights; the moments stand beside them."""

SegmentState = tuple[MasterSegment, dict[str, Tensor]]
"""A segment and its 1-D tensors by kind: master, exp_avg, exp_avg_sq."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands, besides its tensors."""

    iteration: int
    consumed_samples: int
    seed: int
    optimizer_steps: int
    skipped_iterations: int
    nan_iterations: int


def save_checkpoint(directory: str | Path, state: RunState, segments: Sequence[SegmentState], mesh: Mesh) -> Path:
    """Write one checkpoint; collective over all ranks. Returns its directory.

    Raises CheckpointError on every rank when any rank could not write; older checkpoints stay whole.
    """
    return write_tensors(directory, state, _state_dict(_written_here(segments, mesh)), mesh)


def write_tensors(
    directory: str | Path, state: RunState, tensors: dict[str, Tensor], mesh: Mesh, flag: str = "--save"
) -> Path:
    """As save_checkpoint, of tensors by kind and global name; `flag` is who is to blame for `directory`."""
    root = Path(directory)
    final = root / f"iter_{state.iteration:07d}"
    partial = root / f"{final.name}.partial"
    try:
        _on_rank_zero(lambda: _prepare(partial), mesh)
        with _single_process_is_meant():
            save_tensors(tensors, storage_writer=_Writer(partial), no_dist=mesh.world is None)
        _on_rank_zero(lambda: _publish(partial, final, state), mesh)
    except (CheckpointException, Exception) as error:  # the first is only a BaseException
        raise CheckpointError(
            f"{flag} {root}: iteration {state.iteration} could not be written ({_cause(error)}); "
            "older checkpoints there are untouched: free disk space or choose another directory"
        ) from error
    return final


def load_checkpoint(directory: str | Path, segments: Sequence[SegmentState], mesh: Mesh) -> RunState:
    """Fill the segments in place from the newest checkpoint under `directory`; collective over all ranks.

    Raises CheckpointError, on every rank, when there is none, when it belongs to another model, or when
    it cannot be read.
    """
    tensors = _state_dict(segments)
    # All ranks judge by the tensors of all, so that none goes on alone into a collective.
    shapes = _gather_shapes(tensors, mesh)
    final = latest_checkpoint(directory)
    state = _read_state(final)
    stored = stored_tensors(final)
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
            f"it is damaged; write the number of an older one into {LATEST}"
        ) from error


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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


def latest_checkpoint(directory: str | Path) -> Path:
    """The newest whole checkpoint; raises CheckpointError that says what is missing."""
    root = Path(directory)
    pointer = root / LATEST
    if not pointer.exists():
        raise CheckpointError(
            f"--load {root}: {LATEST} is not there, so it holds no whole checkpoint: "
            "give the directory that an earlier run named with --save"
        )
    text = pointer.read_text(encoding="utf-8").strip()
    if not text.isdecimal():
        raise CheckpointError(
            f"--load {root}: {LATEST} holds {text!r}, not the number of an iteration: write that number there"
        )
    final = root / f"iter_{int(text):07d}"
    if not final.is_dir():
        raise CheckpointError(
            f"--load {root}: {LATEST} names {final.name}, which is not there: write the number of one that is"
        )
    return final


def has_checkpoint(directory: str | Path) -> bool:
    return (Path(directory) / LATEST).exists()


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


def _read_state(final: Path) -> RunState:
    try:
        state = json.loads((final / "run_state.json").read_text(encoding="utf-8"))
        version = state.pop("schema_version")
        if version != SCHEMA_VERSION:
            raise CheckpointError(
                f"--load {final}: written by another version of memo, in schema {version}, but this one "
                f"reads schema {SCHEMA_VERSION}: use the version that wrote it"
            )
        return RunState(**state)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"--load {final}: run_state.json cannot be read ({_cause(error)}): choose another checkpoint"
        ) from error


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


class _Writer(FileSystemWriter):
    """Writes several files one after another, because torch keeps all tensors of a file until it is closed.

    Names the operating system's error where torch's own clean-up hides it behind a later one.
    """

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


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without a process group torch warns that it assumes a single process, which is so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _prepare(partial: Path) -> None:
    partial.mkdir(parents=True, exist_ok=True)
    for left in partial.parent.glob("iter_*.partial"):  # by runs that died while saving
        shutil.rmtree(left)
    partial.mkdir()


def _publish(partial: Path, final: Path, state: RunState) -> None:
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(state)}, indent=1)
    _write_durably(partial / "run_state.json", text)
    replaced = final.with_name(f"{final.name}.replaced.partial")
    if final.exists():  # the same iteration saved twice: the newer one counts
        os.replace(final, replaced)
    os.replace(partial, final)
    shutil.rmtree(replaced, ignore_errors=True)
    pointer = final.parent / LATEST
    _write_durably(pointer.with_suffix(".tmp"), f"{state.iteration}\n")
    os.replace(pointer.with_suffix(".tmp"), pointer)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _on_rank_zero(action: Callable[[], None], mesh: Mesh) -> None:
    """Run on rank 0; all ranks wait for it, and all raise when it fails."""
    failure: list[str | None] = [None]
    if mesh.rank == 0:
        try:
            action()
        except OSError as error:
            failure = [str(error)]
    if mesh.world is not None:
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise OSError(failure[0])


def _cause(error: BaseException) -> str:
    """The first real error behind torch's collective exception, in one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
