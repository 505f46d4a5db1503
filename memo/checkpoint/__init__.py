"""Training state on disk, independent of the layout that wrote it."""

from memo.checkpoint.directory import has_checkpoint, latest_checkpoint, resolve_checkpoint
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import load_checkpoint, save_checkpoint

__all__ = [
    "RunState",
    "has_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "resolve_checkpoint",
    "save_checkpoint",
]
