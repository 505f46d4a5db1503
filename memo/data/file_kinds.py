"""The kind of a file by its name, and the files of a folder that are read as documents."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memo.artifacts.fields import is_file_name
from memo.artifacts.model_directory import path_within
from memo.artifacts.reading import Source, read_json_object, shown
from memo.config.hugging_face import hub_name
from memo.errors import CheckpointError, DataError

Kind = Literal["lines", "json", "csv", "parquet", "arrow", "text"]
"""JSON lines; a list of JSON (or lines); a table with commas or tabs; tables of pyarrow; a document a file."""
JSON_LINES_SUFFIX = ".jsonl"
TEXT_SUFFIXES = frozenset(
    {".c", ".cc", ".cpp", ".cu", ".h", ".html", ".js", ".md", ".py", ".rs", ".rst", ".tex", ".txt"}
)
"""Texts that are taken from a folder; a file that is named itself may have any suffix."""
_KINDS: dict[str, Kind] = {
    JSON_LINES_SUFFIX: "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
_IN_BLOCKS = ("parquet", "arrow")
"""Kinds that compress their own content and are not read from beginning to end, so none has .gz and the like."""
ALL_KINDS: frozenset[Kind] = frozenset({*_KINDS.values(), "text"})
CHAT_KINDS: frozenset[Kind] = frozenset({"lines", "json", "parquet", "arrow"})
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` of Hugging Face's datasets writes beside the tables of a data set, and above those of several."""
_DESCRIPTIONS = frozenset(
    {_STATE, _SPLITS, "dataset_info.json", "dataset_infos.json", "config.json", "generation_config.json"}
    | {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "package.json"}
)
"""Names of .json files in folders that hold no documents."""


def file_kind(path: Path) -> Kind | None:
    """The kind of a file by its name, .gz and the like left aside; None for one that does not tell."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSED_SUFFIXES
    if is_compressed:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    kind = "text" if last in TEXT_SUFFIXES else _KINDS.get(last)
    return None if is_compressed and kind in _IN_BLOCKS else kind


@dataclass(frozen=True)
class Inputs:
    """Files to read, in order."""

    files: list[Path] = field(default_factory=list)
    ignored: list[Path] = field(default_factory=list)
    """Files of folders that are of no kind that is taken, in order."""

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def list_files(inputs: Sequence[str | Path], kinds: Collection[Kind] = ALL_KINDS) -> Inputs:
    """Files as given; a directory stands for its files of one of `kinds` at any depth, sorted by relative path.

    A directory that `save_to_disk` wrote stands for its tables, in their order. Hidden files and folders are left out,
    and __pycache__. Raises DataError for a missing input, for a directory without such files, and for one of several
    splits.
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


def walk(folder: Path) -> list[Path]:
    """All files below `folder`, sorted as strings: the same order everywhere. Hidden ones and __pycache__ are left out.

    Raises DataError for a link that leads out of it.
    """
    relative = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    shown = (path.as_posix() for path in relative if not any(map(_is_skipped, path.parts)))
    return [_within(folder, name) for name in sorted(shown)]


def _is_skipped(name: str) -> bool:
    """Hidden files and folders, and what Python keeps of the modules beside it."""
    return name.startswith(".") or name == "__pycache__"


def _within(folder: Path, name: str) -> Path:
    """A file of a folder. Raises DataError where it leads out: what lies elsewhere is not to get into a corpus."""
    try:
        path_within(folder, name)
    except CheckpointError as error:
        raise DataError(str(error)) from None
    return folder / name


def _add_folder(folder: Path, kinds: Collection[Kind], found: Inputs) -> None:
    if (folder / _SPLITS).is_file():
        folder = _only_split(folder)
    if (folder / _STATE).is_file():
        found.files.extend(_saved_tables(folder))
        return
    files = walk(folder)
    taken = [path for path in files if file_kind(path) in kinds and path.name not in _DESCRIPTIONS]
    if any(file_kind(path) not in ("lines", "text") for path in taken):  # a data set of the hub: these two describe it
        taken = [path for path in taken if path.stem.upper() not in ("README", "LICENSE")]
    if not taken:
        text = " and no text files" if "text" in kinds else " files"
        raise DataError(f"{folder} holds no {JSON_LINES_SUFFIX}{text}, nor tables; name the files themselves")
    found.files.extend(taken)
    chosen = set(taken)
    found.ignored.extend(path for path in files if path not in chosen and path.name not in _DESCRIPTIONS)


def _only_split(folder: Path) -> Path:
    """The data set of a folder of splits, if it has but one."""
    source = Source(str(folder / _SPLITS), DataError, "name the folder of one split")
    splits = read_json_object(folder / _SPLITS, source).get("splits")
    names = [str(name) for name in splits] if isinstance(splits, list) else []
    if len(names) != 1:
        raise DataError(
            f"{folder} is a data set of the splits {', '.join(names) or 'none'}; name those to read, such as "
            f"{folder / (names[0] if names else 'train')}"
        )
    if not is_file_name(names[0]):
        raise source.refusal(f"names the split {shown(names[0])}, which is no name of a folder")
    return _within(folder, names[0])


def _saved_tables(folder: Path) -> list[Path]:
    """The files of a data set that `save_to_disk` wrote."""
    source = Source(str(folder / _STATE), DataError, "save the data set again, or name its .arrow files")
    entries = read_json_object(folder / _STATE, source).get("_data_files")
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not names or not all(isinstance(name, str) and is_file_name(name) for name in names):
        raise source.refusal("names no files of the data set")
    return [_within(folder, str(name)) for name in names]
