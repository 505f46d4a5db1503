"""The small files beside a model's weights: tokenizer, chat template, generation settings."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from memo.artifacts.model_directory import model_file
from memo.artifacts.regular_file import open_regular, replace_file, replacing
from memo.data import BPETokenizer, ByteTokenizer
from memo.data.tokenizer import END_OF_DOCUMENT_NAMES

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
