"""Imports and exports models of Hugging Face, and loads them into runs: the same weights under other names."""
