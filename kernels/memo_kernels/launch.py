"""The arguments of kernel launches: rows of tensors, programs, warps. Needs no Triton."""

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """x [..., n] as [rows, n] with contiguous columns; a view wherever strides allow one."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x.reshape(-1, x.shape[-1])


def num_programs(num_rows: int, device: torch.device) -> int:
    """Number of programs to divide the rows among: enough to fill the device twice."""
    if device.type != "cuda":
        return min(num_rows, 4)
    return min(num_rows, 2 * torch.cuda.get_device_properties(device).multi_processor_count)


def num_warps(block: int) -> int:
    """Number of warps (of 32 threads) for a block of `block` columns."""
    return 4 if block <= 2048 else 8 if block <= 8192 else 16
