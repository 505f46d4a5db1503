"""The small files beside a model's weights: tokenizer, chat template, generation settings."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from memo.artifacts.model_directory import model_file, path_within
from memo.artifacts.regular_file import open_regular, replace_file, replacing
from memo.checkpoint.directory import has_checkpoint, resolve_checkpoint
from memo.config import RunConfig
from memo.config.hugging_face import CONFIG_FILE
from memo.data import BPETokenizer, ByteTokenizer
from memo.data.tokenizer import END_OF_DOCUMENT_NAMES
from memo.errors import CheckpointError, reason_of

COMPANION_DIR = "hugging_face"
"""Where a checkpoint of memo keeps them."""

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
)


def copy_companions(source: Path, target: Path, names: Sequence[str] = COMPANIONS) -> list[str]:
    """Copy those of `names` that exist into `target`, which is made; returns their names.

    Raises CheckpointError, before anything is copied, for a name that leads out of `source` or is no regular file;
    OSError if `target` cannot be written.
    """
    found = {name: path for name in names if (path := model_file(source, name)) is not None}
    target.mkdir(parents=True, exist_ok=True)
    for name, path in found.items():
        with open(open_regular(path), "rb") as theirs, replacing(target / name) as ours:
            shutil.copyfileobj(theirs, ours)
    return list(found)


def keep_companions(config: RunConfig, save: str) -> None:
    """Copy into SAVE what an export of the run takes from the model that it goes on from, and remove an earlier one's.

    An export looks nowhere else: by then a config.toml may be a stranger's, and name any directory. Raises
    CheckpointError for files that lead out of their directory, and where SAVE cannot be written.
    """
    checkpoint, target = config.checkpoint, path_within(save, COMPANION_DIR)
    sources = [] if checkpoint.pretrained_checkpoint is None else [Path(checkpoint.pretrained_checkpoint)]
    if checkpoint.load is not None and has_checkpoint(checkpoint.load):
        sources.insert(0, path_within(resolve_checkpoint(checkpoint.load).parent, COMPANION_DIR))
    source = next((each for each in sources if model_file(each, CONFIG_FILE) is not None), None)
    if source == target:
        return
    names = (CONFIG_FILE, *COMPANIONS)
    try:
        copied = [] if source is None else copy_companions(source, target, names)
        for name in set(names) - set(copied):
            (target / name).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"--save {save} cannot be written ({reason_of(error)}): remove what is there, or give another directory"
        ) from None


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """The same as copy_companions, from a directory or from one tokenizer.json; nothing if `source` does not exist.

    For a tokenizer.json alone a tokenizer_config.json is written as well, so that AutoTokenizer uses it unchanged;
    otherwise AutoTokenizer would choose a class by the model's architecture, which may add rules.
    """
    if source.is_dir():
        return copy_companions(source, target)
    if not source.is_file():
        return []
    tokenizer = BPETokenizer(source)
    return _write_tokenizer(tokenizer.definition, tokenizer.eod_name, target)


def write_byte_tokenizer(target: Path) -> None:
    """The tokenizer of bytes, in the same two files."""
    _write_tokenizer(ByteTokenizer().definition, END_OF_DOCUMENT_NAMES[0], target)


def _write_tokenizer(definition: bytes, eod: str, target: Path) -> list[str]:
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod}
    replace_file(target / "tokenizer.json", definition)
    replace_file(target / "tokenizer_config.json", json.dumps(facts, indent=2) + "\n")
    return ["tokenizer.json", "tokenizer_config.json"]
