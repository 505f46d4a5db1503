"""Checkpoints on disk: written aside, then renamed, so that the last whole one always stays.

    DIR/iter_0000100/                          torch.distributed.checkpoint files and run_state.json
    DIR/latest_checkpointed_iteration.txt      Megatron's name for the pointer to the newest

Every value is stored under the name and shape of the global tensor (`master/layers.0.mlp.fc1.weight`), so
a checkpoint loads into any layout.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from memo.checkpoint.chunks import ChunkedTensor, global_chunks
from memo.errors import CheckpointError
from memo.mesh import Mesh
from memo.parallel.data import MasterSegment

LATEST = "latest_checkpointed_iteration.txt"
SCHEMA_VERSION = 1

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


def save_checkpoint(
    directory: str | Path, state: RunState, segments: Sequence[SegmentState], mesh: Mesh
) -> Path:
    """Write one checkpoint; collective over all ranks. Returns its directory.

    Raises CheckpointError on every rank when any rank could not write; older checkpoints stay whole.
    """
    root = Path(directory)
    final = root / f"iter_{state.iteration:07d}"
    partial = root / f"{final.name}.partial"
    tensors = _state_dict(_written_here(segments, mesh))
    try:
        _on_rank_zero(lambda: _prepare(partial), mesh)
        save_tensors(tensors, checkpoint_id=partial, no_dist=mesh.world is None)
        _on_rank_zero(lambda: _publish(partial, final, state), mesh)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"--save {root}: iteration {state.iteration} could not be written ({_cause(error)}); "
            "older checkpoints there are untouched: free disk space or choose another directory"
        ) from error
    return final


def load_checkpoint(directory: str | Path, segments: Sequence[SegmentState], mesh: Mesh) -> RunState:
    """Fill the segments in place from the newest checkpoint under `directory`.

    Raises CheckpointError when there is none, or when it belongs to another model.
    """
    final = latest_checkpoint(directory)
    try:
        state = json.loads((final / "run_state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"--load {final}: run_state.json cannot be read ({error}): choose another"
        ) from error
    if state.pop("schema_version", None) != SCHEMA_VERSION:
        raise CheckpointError(f"--load {final}: written by another version of memo: use that version")
    tensors = _state_dict(segments)
    _check_shapes(final, tensors)
    load_tensors(tensors, checkpoint_id=final, no_dist=mesh.world is None)
    return RunState(**state)


def latest_checkpoint(directory: str | Path) -> Path:
    """The newest whole checkpoint; raises CheckpointError that says what is missing."""
    root = Path(directory)
    pointer = root / LATEST
    if not pointer.exists():
        raise CheckpointError(
            f"--load {root}: {LATEST} is not there, so it holds no whole checkpoint: "
            "give the directory that an earlier run named with --save"
        )
    final = root / f"iter_{int(pointer.read_text()):07d}"
    if not final.is_dir():
        raise CheckpointError(f"--load {root}: {LATEST} names {final.name}, which is not there")
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


def _check_shapes(final: Path, tensors: dict[str, Tensor]) -> None:
    stored = FileSystemReader(final).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in stored:
            raise CheckpointError(f"--load {final}: it holds no {name}: it belongs to another model")
        shape = tuple(stored[name].size)  # type: ignore[union-attr]
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"--load {final}: {name} has shape {shape} there and {tuple(tensor.shape)} in this model: "
                "give the model flags of the run that saved it"
            )


def _prepare(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that died while saving
    partial.mkdir(parents=True)


def _publish(partial: Path, final: Path, state: RunState) -> None:
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(state)}, indent=1)
    _write_durably(partial / "run_state.json", text)
    if final.exists():  # the same iteration saved twice: the newer one counts
        shutil.rmtree(final)
    os.replace(partial, final)
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


def _cause(error: Exception) -> str:
    """The first real error behind torch's collective exception, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
