"""`memo import`: writes a Hugging Face directory as a checkpoint of memo, tensor by tensor.

OUT/iter_0000000/     masters in their published dtype; no moments
OUT/config.toml       the model's shape and its directory, for `memo train --config`
OUT/hugging_face/     config.json, tokenizer, generation settings, weights around a text model, for `memo export`
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from memo.artifacts.model_directory import path_within
from memo.artifacts.regular_file import replace_file
from memo.checkpoint.chunks import GlobalTensor, Part
from memo.checkpoint.directory import has_checkpoint
from memo.checkpoint.files import RUN_CONFIG
from memo.checkpoint.hugging_face.companions import COMPANION_DIR, COMPANIONS, copy_companions, keep_rest
from memo.checkpoint.hugging_face.load import open_pretrained
from memo.checkpoint.hugging_face.weights import PretrainedWeights
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import MASTER, write_tensors
from memo.config import RunConfig
from memo.config.hugging_face import CONFIG_FILE, read_config
from memo.config.identity import model_identity
from memo.config.run import CheckpointConfig
from memo.errors import CheckpointError, writing


@dataclass(frozen=True)
class Imported:
    path: Path
    num_weights: int
    companions: list[str]


def import_checkpoint(directory: str | Path, out: str | Path) -> Imported:
    """Write the model of `directory` to OUT as iteration 0, in one process with at most one file in memory at a time.

    Raises ConfigError for a model that memo cannot train, and CheckpointError for files that are damaged or lie outside
    `directory`, for an OUT that already holds a checkpoint, and for a full disk.
    """
    source, root = Path(directory), Path(out)
    theirs = read_config(source)
    config = RunConfig(model=theirs.model, checkpoint=CheckpointConfig(pretrained_checkpoint=str(source)))
    usual = config.data.seq_length  # an export says that a model is made for the length of its run, if that is longer
    config = config.override({"seq_length": min(usual, theirs.model.max_position_embeddings or usual)})
    weights = open_pretrained(source, config)
    if has_checkpoint(root):
        raise CheckpointError(f"--out {root} holds a checkpoint already: choose another directory, or remove it")
    by_file = sorted(weights.shapes, key=weights.file)
    tensors = {f"{MASTER}{name}": _on_disk(weights, name) for name in by_file}
    state = RunState(0, 0, config.training.seed, 0, 0, 0, model=model_identity(config))
    with writing(f"--out {root}", CheckpointError):
        target = path_within(root, COMPANION_DIR)
        companions = copy_companions(source, target, (CONFIG_FILE, *COMPANIONS)) + keep_rest(weights, target)
        replace_file(root / RUN_CONFIG, config.to_toml())
    # The pointer to the checkpoint is written last, so an import that fails leaves none.
    path = write_tensors(root, state, tensors, flag="--out")
    weights.files.close()
    return Imported(path, sum(math.prod(tensor.shape) for tensor in tensors.values()), companions)


def _on_disk(weights: PretrainedWeights, name: str) -> GlobalTensor:
    """A global tensor that is read only while it is written."""
    shape = weights.shapes[name]
    return GlobalTensor(shape, weights.dtype(name), [Part((0,) * len(shape), shape, partial(weights.read_whole, name))])
