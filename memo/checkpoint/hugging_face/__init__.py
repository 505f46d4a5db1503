"""Imports and exports models of Hugging Face: the same weights under other names, on disk and in a run."""
