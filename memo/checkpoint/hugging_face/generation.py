"""Names the tokens that end texts of an exported model, for `generate` of transformers.

transformers, and libraries on top of it, generate up to their limit of tokens unless config.json or
generation_config.json names the token that ends a text. A Hugging Face model brings both files; a model that memo
trained from new weights has neither.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memo.artifacts.fields import Count, build, checked
from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source, read_json_object
from memo.artifacts.regular_file import replace_file
from memo.data.chat_templates import load_chat_template, special_tokens
from memo.data.tokenizer import END_OF_DOCUMENT_NAMES
from memo.errors import CheckpointError

GENERATION_FILE = "generation_config.json"
_REMEDY = "mend it, or give another tokenizer with --tokenizer"


@dataclass(frozen=True)
class _AddedToken:
    """The fields of an added token in tokenizer.json that are read."""

    id: Count
    content: str
    special: bool = False


def add_token_ids(folder: Path, config: dict[str, Any], *, answers: bool) -> dict[str, Any]:
    """Return `config`, the content of a config.json, with missing token ids taken from the tokenizer in `folder`.

    Writes generation_config.json if there is none. If the model has learned to answer in the chat template of `folder`
    (`answers`), the special token that ends an answer also ends a text.

    Raises CheckpointError or DataError for files that cannot be read, OSError if a file cannot be written.
    """
    added = _added_tokens(folder)
    ids = _token_ids(folder, added)
    config = config | {key: value for key, value in ids.items() if config.get(key, value) is None}
    path = model_file(folder, GENERATION_FILE)  # copied from the initial model
    known = None if path is None else read_json_object(path, Source(str(path), CheckpointError, "mend or remove it"))
    generation = {key: config[key] for key in _NAMES if config.get(key) is not None} | ids if known is None else known
    if answers and (end := _end_of_answer(folder, added)) is not None:
        ends = generation.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        generation = generation | ({} if end in ends else {"eos_token_id": [end, *ends] if ends else end})
    if generation and generation != known:
        replace_file(folder / GENERATION_FILE, json.dumps(generation, indent=2) + "\n")
    return config


_NAMES = {"bos_token_id": "bos_token", "eos_token_id": "eos_token"}
"""{key of config.json: key of tokenizer_config.json}."""


def _added_tokens(folder: Path) -> list[_AddedToken]:
    path = model_file(folder, "tokenizer.json")
    if path is None:
        return []
    source = Source(str(path), CheckpointError, _REMEDY)
    found = checked(list[Any] | None, read_json_object(path, source).get("added_tokens"), "added_tokens", source)
    return [build(_AddedToken, each, source, ignore_unknown=True) for each in found or ()]


def _token_ids(folder: Path, added: list[_AddedToken]) -> dict[str, int]:
    """The ids of the tokenizer's named tokens; without names, the end of documents is the token that memo chose."""
    ids, named = {token.content: token.id for token in added}, special_tokens(folder)
    found = {key: ids[named[name]] for key, name in _NAMES.items() if named.get(name) in ids}
    ends = [{"eos_token_id": ids[name]} for name in END_OF_DOCUMENT_NAMES if name in ids]
    return (ends[0] if ends else {}) | found


def _end_of_answer(folder: Path, added: list[_AddedToken]) -> int | None:
    special = {token.content: token.id for token in added if token.special}
    return special.get(load_chat_template(folder, tuple(special)).end_of_answer() or "")
