"""A file that shows a launcher that a run makes progress; it is replaced whenever a step is complete."""

import json
import os
import time
import warnings
from pathlib import Path

from memo.errors import host_name


class Heartbeat:
    """Writes the file; `iteration` is the last complete one. One thread alone may call write()."""

    def __init__(self, path: str) -> None:
        self.path, self.iteration = Path(path), 0
        self._written: int | None = None

    def write(self) -> None:
        """Replace the file if the iteration has changed. If that fails, this warns, and training goes on."""
        if self.iteration == self._written:
            return
        self._written = self.iteration
        content = {"iteration": self._written, "time": time.time(), "pid": os.getpid(), "host": host_name()}
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            warnings.warn(f"--heartbeat-file {self.path}: {error.strerror or error}", stacklevel=1)
