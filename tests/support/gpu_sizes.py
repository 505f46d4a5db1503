"""How long the sequences of tests/gpu are."""

from memo.emulated_gpu.launch import is_emulated

SHORTER = 4 if is_emulated() else 1
"""On a GPU kernels must take a while, or what relies on their end shows nowhere. On an emulated one a schedule decides
when work runs, whatever its size, so there sequences are shorter by this."""
