"""A file by which a launcher sees that a run goes forward: replaced as a whole whenever a step is complete."""

import json
import os
import time
import warnings
from pathlib import Path

from memo.errors import host_name


class Heartbeat:
    """Holds the iteration that is complete; write() may be called at any time, by one thread."""

    def __init__(self, path: str) -> None:
        self.path, self.iteration = Path(path), 0
        self._written: int | None = None

    def write(self) -> None:
        """Replace the file where the iteration has changed. A disk that fails warns once, and training goes on."""
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
