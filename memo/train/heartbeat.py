"""A file that shows a launcher that a run makes progress; it is replaced after each complete step."""

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from memo.artifacts.fields import build
from memo.artifacts.reading import Source, read_json_object
from memo.artifacts.regular_file import replace_file
from memo.errors import ArtifactError, host_name, warn


@dataclass(frozen=True)
class _Beat:
    iteration: int
    time: float
    pid: int
    host: str


def check_heartbeat(path: str) -> None:
    """Raises ArtifactError for a file of something else, which a run would replace; an empty file passes."""
    source = Source(
        f"--heartbeat-file {path}", ArtifactError, "give a file that --heartbeat-file wrote, or another path"
    )
    if os.path.getsize(path):
        build(_Beat, read_json_object(path, source), source)


class Heartbeat:
    """Writes the heartbeat file. `iteration` is the last complete iteration. Only one thread may call write()."""

    def __init__(self, path: str) -> None:
        self.path, self.iteration = Path(path), 0
        self._written: int | None = None

    def write(self) -> None:
        """Replace the file if the iteration has changed; warns if that fails."""
        if self.iteration == self._written:
            return
        self._written = self.iteration
        beat = _Beat(self._written, time.time(), os.getpid(), host_name())
        try:
            replace_file(self.path, json.dumps(dataclasses.asdict(beat)) + "\n")
        except OSError as error:
            warn(f"--heartbeat-file {self.path}: {error.strerror or error}")
