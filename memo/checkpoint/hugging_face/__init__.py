"""Imports and exports models of Hugging Face: the same weights under other names, on disk and in a run."""

from memo.checkpoint.hugging_face.companions import keep_companions
from memo.checkpoint.hugging_face.exporter import Exported, export_checkpoint
from memo.checkpoint.hugging_face.importer import Imported, import_checkpoint
from memo.checkpoint.hugging_face.load import load_pretrained, open_pretrained, pretrained_directory

__all__ = [
    "Exported",
    "Imported",
    "export_checkpoint",
    "import_checkpoint",
    "keep_companions",
    "load_pretrained",
    "open_pretrained",
    "pretrained_directory",
]
