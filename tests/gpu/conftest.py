"""What tests on a GPU need that ask for the same bits in every run."""

import os
from collections.abc import Iterator

import pytest
import torch

# cuBLAS reads it at the first product of a process, which may be another test's; runs with --deterministic need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def order_is_free_again() -> Iterator[None]:
    """A run with --deterministic tells torch so for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)
