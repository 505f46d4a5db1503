"""Imported, it gives a peak to runs on a CPU without --peak-tflops, which each would measure it for half a second."""

import torch

from memo.train import device

measured_flops = device._measured_flops


def _known_flops(of: torch.device, dtype: torch.dtype) -> float:
    return 1e12 if of.type == "cpu" else measured_flops(of, dtype)


device._measured_flops = _known_flops
