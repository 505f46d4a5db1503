"""Matrices in NF4 as bitsandbytes saves them: 4 bits a number, with scales that may be quantised themselves.

    NAME                                         uint8 [n / 2, 1], the first number in the upper half of a byte; or
                                                 these bytes as numbers of bnb_4bit_quant_storage, such as bf16
    NAME.quant_map                               fp32 [16], the values of the codes
    NAME.absmax                                  a scale for every 64 numbers: fp32, or quantised to uint8 with
    NAME.nested_quant_map, NAME.nested_absmax    fp32 [256], the values of scales, and a scale for every 256 scales
    NAME.quant_state.bitsandbytes__nf4           JSON as bytes: shape, block sizes, the offset of each scale

They are read as fp32. --quantize nf4 makes the same codes and scales from the result.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memo.artifacts.reading import shown
from memo.checkpoint.hugging_face.files import DTYPES, TensorFiles
from memo.errors import CheckpointError

STATE = ".quant_state.bitsandbytes__nf4"
_SUFFIXES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE)
DTYPE = torch.float32


def is_coded(files: TensorFiles, name: str) -> bool:
    return name + STATE in files.tensors


def companions(name: str) -> tuple[str, ...]:
    """Names of the tensors beside the matrix `name`."""
    return tuple(name + suffix for suffix in _SUFFIXES)


def shape_of(files: TensorFiles, name: str) -> tuple[int, ...]:
    """The shape of the matrix. Raises CheckpointError for missing tensors."""
    state = _state(files, name)
    kinds = (".absmax", ".quant_map") + ((".nested_absmax", ".nested_quant_map") if "nested_offset" in state else ())
    missing = [kind for kind in kinds if name + kind not in files.tensors]
    if missing:
        raise CheckpointError(f"{files.directory} holds no {name}{missing[0]}: download the model again")
    return tuple(state["shape"])


def read(files: TensorFiles, name: str, slices: Sequence[slice]) -> Tensor:
    """Read a rectangle of the matrix as fp32; whole blocks of its rows are read from the file."""
    state, (rows, columns) = _state(files, name), slices
    width, size = int(state["shape"][1]), int(state["blocksize"])
    first, last = rows.start * width, rows.stop * width
    blocks = slice(first // size, -(-last // size))
    held = 2 * DTYPES.get(files.tensors[name].dtype, torch.uint8).itemsize  # codes in a stored number
    stored = files.read(name, (slice(blocks.start * size // held, blocks.stop * size // held), slice(0, 1)))
    codes = stored.flatten().view(torch.uint8).int()
    levels = files.read(f"{name}.quant_map", (slice(0, 16),))
    numbers = levels[torch.stack((codes >> 4, codes & 15), 1)].view(-1, size)
    values = (numbers * _scales(files, name, state, blocks).unsqueeze(1)).flatten()
    own = values[first - blocks.start * size : last - blocks.start * size]
    return own.view(-1, width)[:, columns]


def _scales(files: TensorFiles, name: str, state: dict[str, Any], blocks: slice) -> Tensor:
    scales = files.read(f"{name}.absmax", (blocks,))
    if "nested_offset" not in state:
        return scales
    levels = files.read(f"{name}.nested_quant_map", (slice(0, 256),))[scales.int()]
    of_scales = files.read(f"{name}.nested_absmax", (slice(None),))
    numbers = torch.arange(blocks.start, blocks.stop) // int(state["nested_blocksize"])
    return levels * of_scales[numbers] + float(state["nested_offset"])


def _state(files: TensorFiles, name: str) -> dict[str, Any]:
    content = bytes(files.read(name + STATE, (slice(None),)).tolist())
    try:
        state: dict[str, Any] = json.loads(content)
        is_known = len(state["shape"]) == 2 and state["quant_type"] == "nf4" and int(state["blocksize"]) > 0
    except (ValueError, KeyError, TypeError):
        is_known = False
    if not is_known:
        raise CheckpointError(
            f"{files.directory}: {name}{STATE} says {shown(content.decode(errors='replace'))}, which is no matrix in "
            "NF4: download the model again, or the one that is not quantised"
        )
    return state
