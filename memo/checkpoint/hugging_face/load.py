"""Loads the weights of a Hugging Face directory as the initial weights of a run; each rank reads only its part."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from memo.checkpoint.chunks import global_chunks
from memo.checkpoint.directory import has_checkpoint
from memo.checkpoint.hugging_face.adapters import read_adapters
from memo.checkpoint.hugging_face.weights import PretrainedWeights
from memo.checkpoint.store import raise_together
from memo.config import RunConfig
from memo.config.hugging_face import read_config
from memo.config.run import CheckpointConfig
from memo.errors import MemoError
from memo.mesh import Mesh
from memo.parallel.data import ShardedDataParallel
from memo.parallel.shards import ShardedParameter
from memo.spec.lora import trains_all
from memo.spec.weights import is_of_adapter


def pretrained_directory(config: RunConfig) -> str | None:
    """The directory with the initial weights of a run; None for random weights. A run that resumes reads only frozen
    weights from it: None if there are none."""
    return frozen_from(config) if _resumes(config.checkpoint) else config.checkpoint.pretrained_checkpoint


def _resumes(checkpoint: CheckpointConfig) -> bool:
    return checkpoint.load is not None and has_checkpoint(checkpoint.load)


def frozen_from(config: RunConfig) -> str | None:
    """The directory whose weights are frozen, so that checkpoints of the run lack them; None if all weights are trained
    or the run has no such directory."""
    return None if trains_all(config.model) else config.checkpoint.pretrained_checkpoint


def open_pretrained(directory: str | Path, config: RunConfig) -> PretrainedWeights:
    """Check that DIR holds the weights of config.model, whose vocabulary must be known; only headers are read.

    The configuration may differ from DIR/config.json (in the scaling of RoPE, for example), but not in names and shapes
    of weights. Raises ConfigError or CheckpointError.
    """
    theirs = read_config(directory)
    positions, in_wrapper = config.model.position_rows(config.data.seq_length), theirs.wrapper is not None
    return PretrainedWeights(directory, config.model, theirs.model_type, positions, in_wrapper=in_wrapper)


def load_pretrained(directory: str | Path, config: RunConfig, data_parallel: ShardedDataParallel, mesh: Mesh) -> None:
    """Fill masters and weights from DIR/*.safetensors; collective over all ranks.

    Each rank reads only the rectangles of its shard of the masters; weights are then gathered from the masters.
    Adapters, which the files lack, are initialized. Raises CheckpointError on every rank if any rank cannot read.
    """
    failure = None
    if config.model.lora_rank:
        data_parallel.initialize(config.training.seed, lambda parameter: is_of_adapter(parameter.local_name))
    try:
        weights = open_pretrained(directory, config)
        _read_masters(weights, data_parallel)
        _read_coded(weights, data_parallel)
        weights.files.close()
        _fill(given_adapters(config), data_parallel)
    except MemoError as error:
        failure = str(error)
    raise_together(failure, mesh.world)
    data_parallel.publish_weights()


def given_adapters(config: RunConfig) -> dict[str, Tensor]:
    """The adapters of --lora-checkpoint by global name; empty without the flag, or in a run that resumes. Raises the
    errors of `read_adapters`."""
    checkpoint = config.checkpoint
    if checkpoint.lora_checkpoint is None or checkpoint.pretrained_checkpoint is None or _resumes(checkpoint):
        return {}
    model_type = read_config(checkpoint.pretrained_checkpoint).model_type
    return read_adapters(checkpoint.lora_checkpoint, config, model_type)


def _fill(given: Mapping[str, Tensor], data_parallel: ShardedDataParallel) -> None:
    """Copy this rank's part of the whole tensors `given`, by global name, into its masters."""
    for owner in data_parallel.master_segments() if given else ():
        for name, tensor in global_chunks(owner.segment, owner.shard, owner.weight.detach()).items():
            for part in tensor.parts if name in given else ():
                part.values().copy_(given[name][part.place])


def _read_masters(weights: PretrainedWeights, data_parallel: ShardedDataParallel) -> None:
    parts = [
        (name, part)
        for owner in data_parallel.master_segments()
        if not is_of_adapter(owner.segment.range.name)
        for name, tensor in global_chunks(owner.segment, owner.shard, owner.weight.detach()).items()
        for part in tensor.parts
    ]
    for name, part in sorted(parts, key=lambda each: weights.file(each[0])):
        part.values().copy_(weights.read(name, part.offset, part.shape))


def _read_coded(weights: PretrainedWeights, data_parallel: ShardedDataParallel) -> None:
    """Read quantized weights; each rank reads its part of tensor and pipeline parallelism."""

    def fill(parameter: ShardedParameter) -> None:
        for piece in parameter.shard.pieces:
            piece.of_local(parameter).copy_(weights.read(piece.name, piece.offset, piece.shape))

    data_parallel.encode(fill)
