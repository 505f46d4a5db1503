"""torch's dtypes by the names of the configuration."""

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a name of `memo.config.training.Dtype`."""
    return _DTYPES[name]
