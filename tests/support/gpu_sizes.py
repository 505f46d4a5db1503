"""Lengths of the sequences of tests/gpu."""

from memo.emulated_gpu.launch import is_emulated

SHORTER = 4 if is_emulated() else 1
"""Factor by which sequences are shorter on an emulated GPU, where a schedule decides when work runs, whatever its size.
On a GPU kernels must take a while: otherwise code that does not wait for their end would pass the tests."""
