"""JSON files with the name and version of a schema: written whole or not at all; other schemas are refused."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from memo.artifacts.fields import build
from memo.artifacts.reading import Source, read_json_object, shown
from memo.artifacts.regular_file import replace_file
from memo.errors import ArtifactError, writing


@dataclass(frozen=True)
class Artifact:
    """Base of a dataclass that is stored in a separate file, with its fields and the name and version of its schema."""

    schema: ClassVar[str]
    version: ClassVar[int] = 1
    remedy: ClassVar[str]
    """The remedy for a damaged file, for messages."""

    def save(self, path: str | Path) -> None:
        """Raises ArtifactError for a path that cannot be written."""
        write(path, self.schema, self.version, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises ArtifactError for a file that `save` did not write, and for values that the fields do not accept."""
        return build(cls, read(path, cls.schema, cls.version), Source(str(path), ArtifactError, cls.remedy))


def write(path: str | Path, schema: str, version: int, body: dict[str, Any]) -> None:
    """Write `body` with its schema; a reader never sees a partial file. Raises ArtifactError."""
    with writing(path, ArtifactError):
        replace_file(path, json.dumps({"schema": schema, "version": version, **body}) + "\n")


def read(path: str | Path, schema: str, version: int) -> dict[str, Any]:
    """The body of a file that `write` wrote. Raises ArtifactError for any other file."""
    source = Source(str(path), ArtifactError, f"give a {schema} file that memo wrote")
    found = read_json_object(path, source)
    if found.get("schema") != schema:
        raise source.refusal(f"holds {shown(found.get('schema'))}, but a {schema!r} is needed", "give another file")
    if found.get("version") != version:
        raise source.refusal(
            f"has version {shown(found.get('version'))} of {schema}, but this memo reads version {version}",
            "write it again",
        )
    return {key: value for key, value in found.items() if key not in ("schema", "version")}
