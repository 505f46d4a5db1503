"""A file that shows a launcher that a run makes progress; it is replaced after each complete step."""

import json
import os
import time
from pathlib import Path

from memo.artifacts.regular_file import replace_file
from memo.errors import host_name, warn


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
        content = {"iteration": self._written, "time": time.time(), "pid": os.getpid(), "host": host_name()}
        try:
            replace_file(self.path, json.dumps(content) + "\n")
        except OSError as error:
            warn(f"--heartbeat-file {self.path}: {error.strerror or error}")
