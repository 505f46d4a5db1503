"""What --data-path can be mistaken for, each with the command that mends it."""

import difflib
import itertools
import os
import shlex
from pathlib import Path

from memo.config import RunConfig
from memo.config.blend import is_weight, read_blend, read_eval_sets
from memo.config.hugging_face import hub_name
from memo.data.conversations import read_conversations
from memo.data.facts import mask_prefix
from memo.data.file_kinds import ALL_KINDS, CHAT_KINDS, file_kind
from memo.data.left_out import raise_it
from memo.data.records import read_pieces
from memo.errors import ConfigError, DataError

_PAIR = (".bin", ".idx")
_MOST_FILES = 10_000
"""Files of a folder that are looked at for a hint: the folder may be the root of a file system."""


def check_corpora(config: RunConfig) -> None:
    """Raises DataError for a corpus of the configuration that is not there, with what to do instead."""
    data, model = config.data, config.checkpoint.pretrained_checkpoint
    if data.data_path is not None:
        for prefix in read_blend("--data-path", data.data_path).prefixes:
            check_prefix("--data-path", prefix, model)
    for words in () if data.eval_data_path is None else read_eval_sets(data.eval_data_path).values():
        for prefix in read_blend("--eval-data-path", words).prefixes:
            check_prefix("--eval-data-path", prefix, model)


def check_prefix(flag: str, prefix: str, model: str | None = None) -> None:
    """Raises DataError unless PREFIX.bin and PREFIX.idx are there.

    Args:
        model: the directory of the model that is to be trained, whose tokenizer a new corpus is built with.
    """
    missing = [suffix for suffix in _PAIR if not os.path.isfile(f"{prefix}{suffix}")]
    if not missing:
        return
    problem = _half(prefix, missing) if len(missing) == 1 else _problem(flag, prefix, model)
    raise DataError(f"{flag} {prefix}: {problem}")


def _half(prefix: str, missing: list[str]) -> str:
    (suffix,) = missing
    return f"{prefix}{_other(suffix)} is there, but {prefix}{suffix} is not: bring both, or build the corpus again"


def _problem(flag: str, prefix: str, model: str | None) -> str:
    path, suffix = Path(prefix), Path(prefix).suffix.lower()
    if suffix in _PAIR and os.path.isfile(path.with_suffix(".idx")) and os.path.isfile(path.with_suffix(".bin")):
        return f"that is one file of a corpus, which is named by what its files have in common: {flag} {prefix[:-4]}"
    if suffix in _PAIR:
        found = "is not there" if not path.exists() else f"has no {path.with_suffix(_other(suffix)).name} beside it"
        remedy = _build(flag, "texts.jsonl", prefix[:-4], model)
        return f"a corpus is a .bin and an .idx file, and this one {found}: {remedy}"
    if path.is_dir():
        return _of_folder(flag, path, model)
    if path.exists():
        kind = file_kind(path)
        command = "build"
        if kind in CHAT_KINDS:
            command = "chat" if _holds_conversations(path) else "pairs" if _holds_pairs(path) else "build"
        out = f"data/{path.name.partition('.')[0] or 'texts'}"
        remedy = _build(flag, prefix, out, model, command)
        if kind in ("csv", "parquet", "arrow"):
            return f"that is a table, not a corpus of tokens: {remedy}"
        return f"that is text, not a corpus of tokens: {remedy}"
    words = prefix.split()
    if len(words) > 1 and is_weight(words[0]):
        listed = ", ".join(f'"{word}"' for word in words)
        return (
            f"that is one word with blanks in it: write {flag} {prefix} without quotes; in Python and TOML [{listed}]"
        )
    if file_kind(path) is not None:
        remedy = _build(flag, prefix, str(path.with_name(path.name.partition(".")[0])), model)
        return f"there is no such file, and a corpus is named without endings: {remedy}"
    return _of_nothing(flag, prefix, model)


def _of_folder(flag: str, path: Path, model: str | None) -> str:
    pairs = sorted(str(each)[:-4] for each in path.glob("*.idx") if each.with_suffix(".bin").exists())
    masks = {str(mask_prefix(pair)) for pair in pairs}
    names = [pair for pair in pairs if pair not in masks]
    if names:
        more = f" (there are also {', '.join(names[1:4])})" if names[1:] else ""
        return f"that is a folder, and a corpus is named without its endings: {flag} {names[0]}{more}"
    first = itertools.islice(path.rglob("*"), _MOST_FILES)
    if any(file_kind(each) in ALL_KINDS for each in first):
        remedy = _build(flag, str(path), f"data/{path.resolve().name or 'texts'}", model)
        return f"that is a folder of texts, not a corpus of tokens: {remedy}"
    return f"that is a folder without a corpus (PREFIX.bin and PREFIX.idx): {_demo(flag, 'data/demo')}"


def _of_nothing(flag: str, prefix: str, model: str | None) -> str:
    folder = Path(prefix).parent
    there = sorted(str(each)[:-4] for each in folder.glob("*.idx")) if folder.is_dir() else []
    near = difflib.get_close_matches(prefix, there, n=1, cutoff=0.6)
    if near:
        return f"there is no {prefix}.bin and {prefix}.idx: did you mean {flag} {near[0]}?"
    if hub_name(prefix) and not folder.is_dir():
        return (
            f"there is no {prefix}.bin and {prefix}.idx, and memo reads local files: a data set of Hugging Face comes "
            f"with `hf download {prefix} --repo-type dataset --local-dir {prefix}`; of its texts as .jsonl, "
            f"{_build(flag, prefix, f'data/{Path(prefix).name}', model)}"
        )
    return (
        f"there is no {prefix}.bin and {prefix}.idx: {_build(flag, 'texts.jsonl', prefix, model)}; or for a first try, "
        f"{_demo(flag, prefix)}"
    )


def _other(suffix: str) -> str:
    return _PAIR[1 - _PAIR.index(suffix)]


def _holds_conversations(path: Path) -> bool:
    """Whether the first record of a file is one of `memo data chat`."""
    try:
        return next(read_conversations([path]), None) is not None
    except (DataError, ConfigError):
        return False


def _holds_pairs(path: Path) -> bool:
    """Whether the first record of a file is one of `memo data pairs`."""
    try:
        piece = next(read_pieces([path], None, raise_it, lines_of_text=True), None)
        record = None if piece is None or not piece.records else piece.read(0)
    except (DataError, ConfigError):
        return False
    return isinstance(record, dict) and {"chosen", "rejected"} <= record.keys()


def _build(flag: str, source: str, prefix: str, model: str | None, command: str = "build") -> str:
    tokenizer = (
        f" --tokenizer {shlex.quote(model)}"
        if model is not None
        else " --tokenizer MODEL"
        if command != "build"
        else ""
    )
    source, prefix = shlex.quote(source), shlex.quote(prefix)
    return f"`memo data {command} {source} {prefix}{tokenizer}` makes one, for {flag} {prefix}"


def _demo(flag: str, prefix: str) -> str:
    prefix = shlex.quote(prefix)
    return f"`memo data demo {prefix}` makes one of Python's sources, for {flag} {prefix}"
