"""Kernels run in Triton's interpreter where there is no GPU, which must be said before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
