"""The small files beside a model's weights: tokenizer, chat template, generation settings."""

import json
import shutil
from pathlib import Path

from memo.artifacts.model_directory import model_file
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


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy those of COMPANIONS that exist into `target`, which is made; returns their names.

    Raises CheckpointError, before anything is copied, for a name that leads out of `source` or is no regular file;
    OSError if `target` cannot be written.
    """
    found = {name: path for name in COMPANIONS if (path := model_file(source, name)) is not None}
    target.mkdir(parents=True, exist_ok=True)
    for name, path in found.items():
        shutil.copyfile(path, target / name)
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


def write_byte_tokenizer(target: Path) -> list[str]:
    """The tokenizer of bytes, in the same two files; returns their names."""
    return _write_tokenizer(ByteTokenizer().definition, END_OF_DOCUMENT_NAMES[0], target)


def _write_tokenizer(definition: bytes, eod: str, target: Path) -> list[str]:
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod}
    (target / "tokenizer.json").write_bytes(definition)
    (target / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return ["tokenizer.json", "tokenizer_config.json"]
