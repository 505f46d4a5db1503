"""The files besides the weights of a text model: tokenizer, chat template, generation settings, other weights."""

import json
from collections.abc import Sequence
from pathlib import Path

from memo.artifacts.model_directory import model_file, path_within
from memo.artifacts.regular_file import copy_file, replace_file
from memo.checkpoint.directory import has_checkpoint, resolve_checkpoint
from memo.checkpoint.hugging_face.load import open_pretrained
from memo.checkpoint.hugging_face.weights import PretrainedWeights
from memo.config import RunConfig
from memo.config.hugging_face import CONFIG_FILE, has_weights, read_config
from memo.config.model import ModelConfig
from memo.data import BPETokenizer, ByteTokenizer
from memo.data.chat_templates import TEMPLATE_SUFFIX
from memo.data.facts import TOKENIZER_SUFFIX, CorpusFacts
from memo.data.tokenizer import END_OF_DOCUMENT_NAMES
from memo.errors import ConfigError

COMPANION_DIR = "hugging_face"
"""The folder of --save that keeps them."""

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
LEARNED_TEMPLATE = f"learned{TEMPLATE_SUFFIX}"
"""The chat template of the conversations that a run learns, which replaces the model's template in an export."""

REST_FILE = "rest.safetensors"
"""The tensors around a text model, such as those that see images: unchanged, for the export."""


def copy_companions(source: Path, target: Path, names: Sequence[str] = COMPANIONS) -> list[str]:
    """Copy the files of `names` that exist into `target`, which is made if needed; returns their names.

    Raises CheckpointError, before anything is copied, for a file outside `source` or one that is not regular; OSError
    if `target` cannot be written.
    """
    found = {name: path for name in names if (path := model_file(source, name)) is not None}
    for name, path in found.items():
        copy_file(path, target / name)
    return list(found)


def keep_rest(weights: PretrainedWeights, target: Path) -> list[str]:
    """Copy the tensors around a text model into `target`; returns the names of the files written.

    Raises OSError if `target` cannot be written.
    """
    if weights.rest:
        weights.files.copy(weights.rest, target / REST_FILE)
    return [REST_FILE] if weights.rest else []


def keep_companions(config: RunConfig, save: str) -> None:
    """Copy into SAVE all files that an export of the run needs: from its initial model, and the tokenizer and chat
    template of its data; remove an earlier run's files.

    An export reads no other files, because a stranger's config.toml might name any file. Raises CheckpointError for
    files that lie outside their directory, OSError if SAVE cannot be written.
    """
    checkpoint, target = config.checkpoint, path_within(save, COMPANION_DIR)
    sources = [] if checkpoint.pretrained_checkpoint is None else [Path(checkpoint.pretrained_checkpoint)]
    if checkpoint.load is not None and has_checkpoint(checkpoint.load):
        sources.insert(0, path_within(resolve_checkpoint(checkpoint.load).parent, COMPANION_DIR))
    names = (CONFIG_FILE, *COMPANIONS, LEARNED_TEMPLATE, REST_FILE)
    source = next((each for each in sources if _has_any(each, names)), None)
    if source != target:
        copied = [] if source is None else copy_companions(source, target, names)
        if source is not None and CONFIG_FILE in copied and has_weights(source) and read_config(source).wrapper:
            copied += keep_rest(open_pretrained(source, config), target)
        for name in set(names) - set(copied):
            (target / name).unlink(missing_ok=True)
    _keep_of_data(config, target)


def _has_any(directory: Path, names: Sequence[str]) -> bool:
    return any(model_file(directory, name) is not None for name in names)


def _keep_of_data(config: RunConfig, target: Path) -> None:
    """Keep the chat template of the run's conversations, and the run's tokenizer if the model has none."""
    prefixes, tokenizer = config.data.prefixes, config.data.tokenizer  # all prefixes are of one tokenizer
    template = next((path for prefix in prefixes if (path := Path(f"{prefix}{TEMPLATE_SUFFIX}")).exists()), None)
    if template is not None:
        copy_file(template, target / LEARNED_TEMPLATE)
    if _has_any(target, COMPANIONS):
        return
    candidates = [] if tokenizer is None else [tokenizer]
    candidates += [f"{prefix}{TOKENIZER_SUFFIX}" for prefix in prefixes]
    if any(copy_tokenizer(Path(candidate), target) for candidate in candidates):
        return
    if tokenizer is None:
        facts = (CorpusFacts.load(prefix) for prefix in prefixes if Path(f"{prefix}.json").exists())
        tokenizer = next((each.tokenizer for each in facts), None)
    if tokenizer == ByteTokenizer.name:
        _write_tokenizer(ByteTokenizer().definition, END_OF_DOCUMENT_NAMES[0], target)


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """copy_companions from a directory, or from one tokenizer.json; copies nothing if `source` does not exist.

    A single tokenizer.json gets a tokenizer_config.json, so that AutoTokenizer uses it unchanged. Otherwise
    AutoTokenizer would choose a class by the model's architecture, which may add rules.
    """
    if source.is_dir():
        return copy_companions(source, target)
    if not source.is_file():
        return []
    tokenizer = BPETokenizer(source)
    return _write_tokenizer(tokenizer.definition, tokenizer.eod_name, target)


def check_tokenizer(source: Path, model: ModelConfig) -> None:
    """Raises ConfigError if there is no `source`, or if the tokenizer.json at or in it has ids that the model lacks."""
    if not source.exists():
        raise ConfigError(f"--tokenizer {source} does not exist: give the directory of a tokenizer's files")
    path = model_file(source, "tokenizer.json") if source.is_dir() else source
    size = 0 if path is None else BPETokenizer(path).vocab_size
    if model.vocab_size is not None and size > model.vocab_size:
        raise ConfigError(
            f"--tokenizer {source} has {size} tokens, but the model's vocabulary has {model.vocab_size}: give the "
            "tokenizer that the run was trained with, or leave the flag out"
        )


def _write_tokenizer(definition: bytes, eod: str, target: Path) -> list[str]:
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod}
    replace_file(target / "tokenizer.json", definition)
    replace_file(target / "tokenizer_config.json", json.dumps(facts, indent=2) + "\n")
    return ["tokenizer.json", "tokenizer_config.json"]
