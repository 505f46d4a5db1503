"""The kernels of gated delta nets (--delta-backend): torch's operations, or those of flash-linear-attention.

The package fla-core (Yang and Zhang, https://github.com/fla-org/flash-linear-attention) has the convolution and the
rule in Triton, forward and backward, on tensor cores: factors are in the model's dtype, sums and S in fp32. Each
document begins a new chunk, so that no document affects another. Only this file imports the package, and only when a
net uses it.

Legend as in memo.attention.delta_rule; D documents of a group of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module, metadata, util
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memo.attention.backends import boundaries_on, numbers_on
from memo.attention.blocks import Documents
from memo.attention.delta_rule import DeltaNet, Gradients, Place, backward, forward
from memo.attention.select import AttentionChoice
from memo.errors import ConfigError
from memo.spec.delta import FLA_CHUNK, FLA_DOCUMENTS, TAPS, group_tokens

_FIRST_VERSION = (0, 6, 0)
"""The first version of fla-core that is accepted; its results and its memory were checked in this version."""
_MOST_HEAD_DIM = 256
"""fla-core holds the matrix of a head in four parts of 64 rows (fla/ops/common/chunk_delta_h.py)."""
_WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))
"""With Triton from the first version to below the second, fla-core refuses a backward on Hopper, unless tilelang is
installed (fla/ops/common/chunk_o.py, chunk_bwd_dqkwg; fla-org/flash-linear-attention, issue 640)."""
_TUNED_TOKENS = 4096
"""Enough to fill a GPU with chunks of one head."""


def choose_delta(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> AttentionChoice:
    """Choose the kernels for `name` (auto, torch or fla) on `device_type`, and give the reason.

    "auto" is fla if it can run. Raises ConfigError for fla if it cannot run.
    """
    if device_type == "cpu" and name != "fla":
        return AttentionChoice("torch", "the one rule of this device")
    if name == "torch":
        return AttentionChoice("torch", "--delta-backend")
    problem = _problem(device_type, dtype, head_dim)
    if name == "fla" and problem is not None:
        raise ConfigError(f"--delta-backend is 'fla', but {problem}; or use --delta-backend auto")
    if problem is not None:
        return AttentionChoice("torch", f"fla, which is several times as fast, cannot run: {problem}")
    return AttentionChoice("fla", "--delta-backend" if name == "fla" else "fla-core is installed")


def select_delta(name: str) -> type[DeltaNet]:
    """Return the DeltaNet that uses the kernels of this name, as `choose_delta` gave it; "auto" is torch's."""
    return FlaDeltaNet if name == "fla" else DeltaNet


@cache
def tune(heads: int, key_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, packed: bool) -> None:
    """Let fla choose among its kernels for nets of this size, before memory is recorded or full.

    fla times each kernel at the first call, which takes seconds and 256 MB.
    """
    channels, length = (heads + 2 * key_heads) * head_dim, min(group_tokens(heads, 1), _TUNED_TOKENS)
    mixed = torch.zeros(length, 1, channels + 2 * heads, dtype=dtype, device=device)
    net = FlaDeltaNet(mixed.new_zeros(channels, TAPS), mixed.new_zeros(heads), mixed.new_zeros(heads), head_dim)
    carry, place = net.empty_carry(mixed), Place(((0, length),) if packed else None, 0)
    out = mixed[..., : heads * head_dim].clone()
    forward(net, mixed, carry, place, out, torch.empty_like(carry))
    sums = (torch.zeros_like(each, dtype=carry.dtype) for each in net[:3])
    backward(net, out, mixed, carry, place, Gradients(torch.empty_like(mixed), torch.zeros_like(carry), *sums))


def _problem(device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why fla cannot run, with the remedy; None if it can."""
    version, triton = _version("fla-core"), _version("triton")
    if device_type != "cuda":
        return f"the device is {device_type!r}: use --device cuda"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"--params-dtype is {str(dtype).removeprefix('torch.')}: use bf16"
    if head_dim > _MOST_HEAD_DIM or head_dim % 8:
        return f"heads are of {head_dim}: it takes multiples of 8 up to {_MOST_HEAD_DIM}"
    if torch.are_deterministic_algorithms_enabled():
        return "--deterministic is on, and it chooses kernels by their speed at each start: leave that out"
    if version is None or version < _FIRST_VERSION:
        found = "not installed" if version is None else f"version {_dotted(version)}"
        return f"fla-core is {found}: pip install 'memo-train[fla]' gives {_dotted(_FIRST_VERSION)} or later"
    if triton is None:
        return "Triton is not installed: pip install triton"
    first, fixed = _WRONG_ON_HOPPER
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    if is_hopper and first <= triton < fixed and util.find_spec("tilelang") is None:
        return (
            f"it refuses Triton {_dotted(triton)} on GPUs of compute capability 9.0, where that computes wrong "
            f"gradients: install Triton {_dotted(fixed)} or later, or tilelang"
        )
    return None


def _version(package: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in re.findall(r"\d+", metadata.version(package))[:3])
    except metadata.PackageNotFoundError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@cache
def _fla() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import fla's functions for the convolution and the rule."""
    return (
        import_module("fla.modules.causal_conv1d").causal_conv1d,
        import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule,
    )


class _Packed(NamedTuple):
    """The documents of a group of tokens, with all sequences one after the other.

    Attributes:
        counts: number of documents of each sequence.
        before: for the first document of each sequence, the number of its tokens before the group.
        options: the boundaries on the device, as keyword arguments of fla.
    """

    counts: tuple[int, ...]
    before: tuple[int, ...]
    options: dict[str, Tensor]

    def enter(self, x: Tensor) -> Tensor:
        """States of sequences [b, ...] -> states at the beginning of documents [D, ...]; zeros for new documents."""
        nothing, parts = x.new_zeros((1, *x.shape[1:])), list[Tensor]()
        for row, (count, before) in enumerate(zip(self.counts, self.before, strict=True)):
            parts.append(x[row : row + 1] if before else nothing)
            parts.append(nothing.expand(count - 1, *x.shape[1:]))
        return torch.cat(parts)

    def leave(self, x: Tensor) -> Tensor:
        """States of documents [D, ...] -> the state of the last document of each sequence, [b, ...]."""
        return torch.cat([x[end - 1 : end] for end in accumulate(self.counts)])


class FlaDeltaNet(DeltaNet):
    """A DeltaNet that uses fla's kernels; memo.spec.delta gives the memory that its backward needs."""

    def groups(self, mixed: Tensor, place: Place) -> list[tuple[slice, Any]]:
        """The groups of a DeltaNet, cut so that each has few documents, because each document takes a matrix for each
        head. `where` is None if sequences are single documents."""
        rows, found = group_tokens(self.heads, mixed.shape[1]), list[tuple[slice, Any]]()
        documents, start, end = *place, place.start + len(mixed)
        while start < end:
            stop, packed = min(start + rows, end), None
            if documents is not None:
                begin = sorted(bound for row in documents for bound in row if start < bound < stop)
                most = max(FLA_DOCUMENTS, 2 * len(documents)) - len(documents)
                stop = begin[most] if len(begin) > most else stop
                packed = _packed(documents, start, stop, mixed.device)
            found.append((slice(start - place.start, stop - place.start), packed))
            start = stop
        return found

    def compute(
        self, x: Tensor, last: Tensor, state: Tensor, beta: Tensor, decay: Tensor, where: _Packed | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        convolve, rule = _fla()
        (length, batch), heads, d = x.shape[:2], self.heads, self.head_dim
        shape = (batch, length) if where is None else (1, batch * length)
        rows, beta, decay = (y.transpose(0, 1).reshape(*shape, y.shape[-1]) for y in (x, beta, decay))
        # fla's convolution takes as many earlier tokens as it has taps, and does not read the first of them.
        before, entering, options = F.pad(last.permute(1, 2, 0), (1, 0)), state, {}
        if where is not None:
            for row, tokens in enumerate(where.before):
                before[row, :, : max(1, TAPS - tokens)] = 0  # those of an earlier document
            before, entering, options = where.enter(before), where.enter(state), where.options
        mixed, _ = convolve(rows, self.kernels, initial_state=before, activation="silu", **options)
        q, k, v = mixed.unflatten(-1, (-1, d)).split([self.key_heads, self.key_heads, heads], dim=2)
        del mixed
        own = {"scale": d**-0.5, "initial_state": entering, "output_final_state": True, **options}
        out, state = rule(q, k, v, decay, beta, use_qk_l2norm_in_kernel=True, **own)
        state = state if where is None else where.leave(state)
        out = out.view(batch, length, heads * d).transpose(0, 1)
        return out, torch.cat((last, x[-(TAPS - 1) :].to(last.dtype)))[-(TAPS - 1) :], state


def _packed(documents: Documents, start: int, stop: int, device: torch.device) -> _Packed:
    """The documents of tokens from `start` to `stop` of each sequence."""
    ends, counts, before = [0], [], []
    for row, bounds in enumerate(documents):
        before.append(start - max(bound for bound in bounds if bound <= start))
        own = [*(bound - start for bound in bounds if start < bound < stop), stop - start]
        counts.append(len(own))
        ends += [row * (stop - start) + end for end in own]
    boundaries, _ = boundaries_on(tuple(ends), device)
    options = {"cu_seqlens": boundaries, "chunk_indices": _chunks_on(tuple(ends), device)}
    return _Packed(tuple(counts), tuple(before), options)


@lru_cache(maxsize=64)  # as boundaries_on
def _chunks_on(boundaries: tuple[int, ...], device: torch.device) -> Tensor:
    """For each chunk, its document and its number in the document, [chunks, 2] on the device. Without them, fla would
    compute them, and wait for the device."""
    lengths = [stop - start for start, stop in pairwise(boundaries)]
    chunks = [(document, n) for document, length in enumerate(lengths) for n in range(-(-length // FLA_CHUNK))]
    return numbers_on(chunks, device)
