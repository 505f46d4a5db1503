"""Finds the kind of a file by its name, and the files of a folder that are read as documents."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memo.artifacts.model_directory import path_within
from memo.config.hugging_face import hub_name
from memo.errors import CheckpointError, DataError

Kind = Literal["lines", "json", "csv", "parquet", "arrow", "text"]
"""JSON lines; a JSON list (or lines); a table with commas or tabs; tables of pyarrow (two); one document a file."""
_TEXTS = (".c", ".cc", ".cpp", ".cu", ".h", ".html", ".js", ".md", ".py", ".rs", ".rst", ".tex", ".txt")
"""Suffixes of texts that are read from a folder; a file that is named itself may have any suffix."""
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson"), "lines"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys(_TEXTS, "text"),
}
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
ALL_KINDS: frozenset[Kind] = frozenset(_KINDS.values())
CHAT_KINDS: frozenset[Kind] = frozenset({"lines", "json", "parquet", "arrow"})
_DESCRIPTIONS = frozenset(
    {"state.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "config.json", "package.json"}
    | {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"}
)
"""Names of .json files in folders that contain no documents."""


def file_kind(path: Path) -> Kind | None:
    """The kind of a file by its name without .gz and the like; None for an unknown suffix."""
    suffix, name = path.suffix.lower(), path
    if suffix in COMPRESSED_SUFFIXES:
        name = path.with_suffix("")
    kind = _KINDS.get(name.suffix.lower())
    # Parquet and Arrow compress their own content and are not read sequentially.
    return None if name is not path and kind in ("parquet", "arrow") else kind


@dataclass(frozen=True)
class Inputs:
    """Files to read, in order."""

    files: list[Path] = field(default_factory=list)
    ignored: list[Path] = field(default_factory=list)
    """Files of folders whose kind is not read, in order."""

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def list_files(inputs: Sequence[str | Path], kinds: Collection[Kind] = ALL_KINDS) -> Inputs:
    """List the given files; a directory means its files of `kinds` at any depth, sorted by relative path.

    Files that `walk` leaves out are left out, and in a directory of `save_to_disk` of Hugging Face's datasets, results
    that `map` has cached there. Raises DataError for a missing input, for a directory without files of `kinds`, and for
    a directory with several splits.
    """
    found = Inputs()
    for path in map(Path, inputs):
        if path.is_dir():
            _add_folder(path, kinds, found)
        elif path.is_file():
            found.files.append(path)
        else:
            hub = f", or fetch a data set: `hf download {path} --repo-type dataset --local-dir {path}`"
            raise DataError(
                f"input {path} does not exist; give files or directories{hub if hub_name(str(path)) else ''}"
            )
    return found


def walk(folder: Path, closed: Collection[str] = ()) -> list[Path]:
    """All files below `folder`, except hidden files and __pycache__, sorted as strings: the same order everywhere.

    Folders with a name in `closed` are not entered.

    Raises DataError for a link that leads out of `folder`, because files elsewhere must not get into a corpus.
    """
    shown, left_out = list[Path](), {"__pycache__", *closed}
    for at, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        paths = [Path(at, name) for name in files if not name.startswith(".") and name not in left_out]
        shown += [path.relative_to(folder) for path in paths if path.is_file()]
    try:
        for name in shown:
            path_within(folder, str(name))
    except CheckpointError as error:
        raise DataError(str(error)) from None
    return [folder / name for name in sorted(shown, key=Path.as_posix)]


def _add_folder(folder: Path, kinds: Collection[Kind], found: Inputs) -> None:
    splits = sorted(str(path.parent) for path in folder.glob("*/state.json"))
    if (folder / "dataset_dict.json").is_file() and len(splits) != 1:
        raise DataError(f"{folder} is a data set of {len(splits)} splits; name those to read: {' '.join(splits)}")
    files = [path for path in walk(folder) if path.name not in _DESCRIPTIONS and not _is_cache(path)]
    taken = [path for path in files if file_kind(path) in kinds]
    if any(
        file_kind(path) not in ("lines", "text") for path in taken
    ):  # a data set of the hub, which these files describe
        taken = [path for path in taken if path.stem.upper() not in ("README", "LICENSE")]
    if not taken:
        texts = " and no text files" if "text" in kinds else " files"
        raise DataError(f"{folder} holds no .jsonl{texts}, nor tables; name the files themselves")
    found.files.extend(taken)
    chosen = set(taken)
    found.ignored.extend(path for path in files if path not in chosen)


def _is_cache(path: Path) -> bool:
    """Whether `map` of Hugging Face's datasets keeps a result there."""
    return path.name.startswith("cache-") and (path.parent / "state.json").is_file()
