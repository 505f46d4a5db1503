"""Weights in FP8 as DeepSeek-V3, Qwen and Mistral publish them: numbers of 8 bits that share scales.

    NAME              float8_e4m3fn [..., out, in]
    NAME_scale_inv    a factor for every block of 128 x 128 numbers, [..., ceil(out / 128), ceil(in / 128)], or a single
                      one for all; FP32, FP16 or BF16

They are read as fp32. Scales of activations, which some files hold for generation, are not read. Source: DeepSeek-V3's
technical report (arXiv 2412.19437), section 3.3.2.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memo.checkpoint.hugging_face.files import DTYPES, TensorFiles
from memo.errors import CheckpointError

_CODES, _SCALES = "F8_E4M3", "_scale_inv"
_BLOCK = 128
DTYPE = torch.float32


def is_coded(files: TensorFiles, name: str) -> bool:
    return name in files.tensors and files.tensors[name].dtype == _CODES


def companions(name: str) -> tuple[str, ...]:
    """Names of the tensors beside the matrix `name`."""
    return name + _SCALES, f"{name.removesuffix('weight')}activation_scale"


def shape_of(files: TensorFiles, name: str) -> tuple[int, ...]:
    """The shape of the matrix. Raises CheckpointError for missing or other scales."""
    shape, scales = files.tensors[name].shape, files.tensors.get(name + _SCALES)
    grid = (*shape[:-2], *(-(-size // _BLOCK) for size in shape[-2:]))
    if scales is None or scales.dtype not in DTYPES or (scales.shape != grid and math.prod(scales.shape) != 1):
        found = "is missing" if scales is None else f"has shape {scales.shape} and dtype {scales.dtype} there"
        raise CheckpointError(
            f"{files.directory}: {name}{_SCALES} {found}, and memo reads FP8 with one scale, or with {grid}, in "
            f"{', '.join(DTYPES)}: use the model's version that is not quantised"
        )
    return shape


def read(files: TensorFiles, name: str, slices: Sequence[slice]) -> Tensor:
    """Read a rectangle of the matrix as fp32."""
    codes, shape = files.read(name, slices).float(), files.tensors[name + _SCALES].shape
    if math.prod(shape) == 1:
        return codes * files.read(name + _SCALES, [slice(None)] * len(shape)).float().reshape(())
    blocks = [slice(part.start // _BLOCK, -(-part.stop // _BLOCK)) for part in slices[-2:]]
    scales = files.read(name + _SCALES, (*slices[:-2], *blocks)).float()
    for dim, part, block in zip((-2, -1), slices[-2:], blocks, strict=True):
        scales = scales.repeat_interleave(_BLOCK, dim)
        scales = scales.narrow(dim, part.start - block.start * _BLOCK, part.stop - part.start)
    return codes * scales
