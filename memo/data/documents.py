"""Files to documents: the text of a corpus, in an order that does not depend on the file system."""

import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from memo.artifacts.reading import Source, kind_of, listed, parse_json, read_lines, read_text
from memo.config.hugging_face import hub_name
from memo.errors import DataError

JSON_LINES_SUFFIX = ".jsonl"
_LARGEST_DOCUMENT_BYTES = 1 << 31
"""Of one text; an index counts tokens of a document in 31 bits."""
TEXT_SUFFIXES = {
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".h",
    ".html",
    ".js",
    ".md",
    ".py",
    ".rs",
    ".rst",
    ".tex",
    ".txt",
}
"""What is taken from a directory; a file that is named itself may have any suffix."""
_INSTALLED_PACKAGES = frozenset({"site-packages", "dist-packages"})


def list_files(
    inputs: Sequence[str | Path], suffixes: Collection[str] = frozenset({JSON_LINES_SUFFIX, *TEXT_SUFFIXES})
) -> list[Path]:
    """Files as given; a directory stands for its files with one of `suffixes` at any depth, sorted by relative path.

    Hidden files and folders are left out. Raises DataError for a missing input, or for a directory without
    such files.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            found = [file for file in _walk(path) if file.suffix.lower() in suffixes]
            if not found:
                text = " and no text files" if len(suffixes) > 1 else " files"
                raise DataError(f"{path} holds no {JSON_LINES_SUFFIX}{text}; name the files themselves")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            hub = f", or fetch a data set: `hf download {path} --repo-type dataset --local-dir {path}`"
            raise DataError(
                f"input {path} does not exist; give files or directories{hub if hub_name(str(path)) else ''}"
            )
    return files


def read_documents(files: Sequence[Path], json_key: str) -> Iterator[str]:
    """A document for each line of a .jsonl file (its string under `json_key`) and for each other file.

    Raises DataError that names the file, and for .jsonl the line, which cannot be read.
    """
    for path in files:
        if path.suffix.lower() == JSON_LINES_SUFFIX:
            yield from _read_json_lines(path, json_key)
        else:
            source = Source(str(path), DataError, "convert it to UTF-8, or leave it out")
            yield read_text(path, source, max_bytes=_LARGEST_DOCUMENT_BYTES)


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line of a .jsonl file that is not blank: where it stands, for messages, and the value.

    Raises DataError that names the file and the line that is no JSON.
    """
    lines = read_lines(path, Source(str(path), DataError, "give a file of JSON lines"))
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json(line, Source(where, DataError, "repair or remove the line"))


def require_utf8(text: str, where: str) -> None:
    """Raises DataError for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair ({error}); repair or remove the line") from error


def standard_library() -> Path:
    """Folder of this Python's own sources."""
    return Path(sysconfig.get_path("stdlib"))


def read_python_sources(folder: Path) -> Iterator[str]:
    """Every UTF-8 .py file below `folder` outside of installed packages, sorted by relative path.

    Sources in another encoding are skipped: the standard library keeps a few to test Python itself.
    """
    for path in _walk(folder):
        if path.suffix == ".py" and _INSTALLED_PACKAGES.isdisjoint(path.relative_to(folder).parts):
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            yield text


def _walk(folder: Path) -> list[Path]:
    """All files below `folder` that are not hidden, sorted as strings: the same order everywhere."""
    relative = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = (path.as_posix() for path in relative if not any(part.startswith(".") for part in path.parts))
    return [folder / name for name in sorted(visible)]


def _read_json_lines(path: Path, json_key: str) -> Iterator[str]:
    for where, record in read_json_lines(path):
        if not isinstance(record, dict) or not isinstance(record.get(json_key), str):
            found = f"[{listed(sorted(record))}]" if isinstance(record, dict) else kind_of(record)
            raise DataError(f"{where}: no string under the key {json_key!r}, found {found}; set the JSON key")
        text: str = record[json_key]
        require_utf8(text, where)
        yield text
