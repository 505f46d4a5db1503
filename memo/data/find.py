"""Explains a --data-path that names no corpus, with the command that mends it."""

import difflib
import os
import shlex
from itertools import islice
from pathlib import Path

from memo.config import RunConfig
from memo.config.blend import is_weight, read_blend, read_eval_sets
from memo.config.hugging_face import hub_name
from memo.data.conversations import is_conversation
from memo.data.facts import mask_prefix
from memo.data.file_kinds import CHAT_KINDS, file_kind
from memo.data.records import read_pieces
from memo.errors import ConfigError, DataError

_PAIR = (".bin", ".idx")
_MOST_FILES = 10_000
"""The most files of a folder that are examined for a hint: the folder may be the root of a file system."""


def check_corpora(config: RunConfig) -> None:
    """Raises DataError for a missing corpus of the configuration, with a remedy."""
    data, model = config.data, config.checkpoint.pretrained_checkpoint
    for prefix in data.prefixes:
        check_prefix("--data-path", prefix, model)
    for words in () if data.eval_data_path is None else read_eval_sets(data.eval_data_path).values():
        for prefix in read_blend("--eval-data-path", words).prefixes:
            check_prefix("--eval-data-path", prefix, model)


def check_prefix(flag: str, prefix: str, model: str | None = None) -> None:
    """Raises DataError unless PREFIX.bin and PREFIX.idx are there; its remedy names the tokenizer of `model`."""
    missing = [suffix for suffix in _PAIR if not os.path.isfile(f"{prefix}{suffix}")]
    if missing:
        raise DataError(f"{flag} {prefix}: {_problem(flag, prefix, model, missing)}")


def _problem(flag: str, prefix: str, model: str | None, missing: list[str]) -> str:
    path, suffix = Path(prefix), Path(prefix).suffix.lower()
    name, words = path.name.partition(".")[0], prefix.split()
    if len(missing) == 1:
        (there,) = {*_PAIR} - {*missing}
        return f"{prefix}{there} is there, but {prefix}{missing[0]} is not: bring both, or build it again"
    if suffix in _PAIR and all(path.with_suffix(each).is_file() for each in _PAIR):
        return f"that is one file of a corpus, which is named by what its files have in common: {flag} {prefix[:-4]}"
    if suffix in _PAIR:
        (other,) = {*_PAIR} - {suffix}
        found = f"has no {path.with_suffix(other).name} beside it" if path.exists() else "is not there"
        remedy = _build(flag, "texts.jsonl", prefix[:-4], model)
        return f"a corpus is a .bin and an .idx file, and this one {found}: {remedy}"
    if path.is_dir():
        return _of_folder(flag, path, model)
    if path.exists():
        remedy = _build(flag, prefix, f"data/{name or 'texts'}", model, _command(path))
        if file_kind(path) in ("csv", "parquet", "arrow"):
            return f"that is a table, not a corpus of tokens: {remedy}"
        return f"that is text, not a corpus of tokens: {remedy}"
    if len(words) > 1 and is_weight(words[0]):
        listed = ", ".join(f'"{word}"' for word in words)
        return (
            f"that is one word with blanks in it: write {flag} {prefix} without quotes; in Python and TOML [{listed}]"
        )
    if file_kind(path) is not None:
        remedy = _build(flag, prefix, str(path.with_name(name)), model)
        return f"there is no such file, and a corpus is named without endings: {remedy}"
    return f"there is no {prefix}.bin and {prefix}.idx: {_instead(flag, prefix, model)}"


def _of_folder(flag: str, path: Path, model: str | None) -> str:
    pairs = sorted(str(each)[:-4] for each in path.glob("*.idx") if each.with_suffix(".bin").exists())
    names = [pair for pair in pairs if pair not in {str(mask_prefix(each)) for each in pairs}]
    if names:
        more = f" (there are also {', '.join(names[1:4])})" if names[1:] else ""
        return f"that is a folder, and a corpus is named without its endings: {flag} {names[0]}{more}"
    if any(file_kind(each) is not None for each in islice(path.rglob("*"), _MOST_FILES)):
        remedy = _build(flag, str(path), f"data/{path.resolve().name or 'texts'}", model)
        return f"that is a folder of texts, not a corpus of tokens: {remedy}"
    return f"that is a folder without a corpus (PREFIX.bin and PREFIX.idx): {_demo(flag, 'data/demo')}"


def _instead(flag: str, prefix: str, model: str | None) -> str:
    """What to do where nothing has the name."""
    folder = Path(prefix).parent
    there = sorted(str(each)[:-4] for each in folder.glob("*.idx")) if folder.is_dir() else []
    if near := difflib.get_close_matches(prefix, there, n=1, cutoff=0.6):
        return f"did you mean {flag} {near[0]}?"
    if hub_name(prefix) and not folder.is_dir():
        return (
            f"memo reads local files, and a data set of Hugging Face comes with `hf download {prefix} --repo-type "
            f"dataset --local-dir {prefix}`; {_build(flag, prefix, f'data/{Path(prefix).name}', model)}"
        )
    return f"{_build(flag, 'texts.jsonl', prefix, model)}; or for a first try, {_demo(flag, prefix)}"


def _command(path: Path) -> str:
    """The command of `memo data` that reads a file, by the fields of its first record."""
    if file_kind(path) not in CHAT_KINDS:
        return "build"
    try:
        piece = next(read_pieces([path], None), None)
    except ConfigError:  # a package that reads it is missing
        piece = None
    records = [] if piece is None else piece.each(lambda record, where: record)[0]
    fields = records[0] if records and isinstance(records[0], dict) else {}
    return "chat" if is_conversation(fields) else "pairs" if {"chosen", "rejected"} <= fields.keys() else "build"


def _build(flag: str, source: str, prefix: str, model: str | None, command: str = "build") -> str:
    given = model or (None if command == "build" else "MODEL")
    tokenizer = "" if given is None else f" --tokenizer {shlex.quote(given)}"
    source, prefix = shlex.quote(source), shlex.quote(prefix)
    return f"`memo data {command} {source} {prefix}{tokenizer}` makes one, for {flag} {prefix}"


def _demo(flag: str, prefix: str) -> str:
    prefix = shlex.quote(prefix)
    return f"`memo data demo {prefix}` makes one of Python's sources, for {flag} {prefix}"
