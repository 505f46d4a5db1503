"""The attention kernels behind one small interface.

Legend: b batch, n query heads, n_kv key/value heads (a divisor of n), s_q and s_k tokens, d head dim, t
packed tokens. Kernels work on [b, n, s, d] and accept strided views whose last dim is contiguous. They
return the output and the natural log-sum-exp of the scaled scores; from a *global* output and log-sum-exp,
the backward of any block of the score matrix gives that block's exact share of the gradients. No kernel
gets a mask tensor.

A forward may get `out`, a view into which its output must be written. Kernels that accept an output write there; the
results of all other kernels are copied (`placed`). In both cases the forward returns `out`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memo_kernels.merge import reference as merge


class Saved(NamedTuple):
    """The tensors that a forward keeps for its backward: its inputs, its output and its log-sum-exp."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class AttentionBackend(ABC):
    """Attention over one block: full, or causal over the same tokens on both sides (then s_q == s_k)."""

    name: str
    softcap = 0.0
    """Cap of scores, 0: none. Only the kernels of memo.config.attention_kernels.CAPPING read it."""
    merge_: Callable[[Tensor, Tensor, Tensor, Tensor], None] = staticmethod(merge.merge_)
    """Merges the results of a block into running ones; it may be replaced by a fused kernel."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q [b, n, s_q, d], k and v [b, n_kv, s_k, d] -> out [b, n, s_q, d] in q's dtype, lse [b, n, s_q].

        lse is fp32, or fp64 for fp64 inputs. Both results may be strided. ``out``, if given, is overwritten.
        """

    @abstractmethod
    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """grad_out [b, n, s_q, d] and the block's slices of the inputs and global results -> dq, dk, dv."""


class VarlenBackend(AttentionBackend):
    """A backend that also accepts several packed documents, each causal in itself, in one call."""

    @abstractmethod
    def forward_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: tuple[int, ...],
        scale: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q [t, n, d], k and v [t, n_kv, d], boundaries (0, ..., t) -> out [t, n, d], lse [n, t] (fp32)."""

    @abstractmethod
    def backward_varlen(
        self, grad_out: Tensor, saved: Saved, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """grad_out [t, n, d] -> dq [t, n, d], dk and dv [t, n_kv, d]."""


class CpuFlash(AttentionBackend):
    """torch's CPU flash kernel: fp64, fp32, bf16 and fp16, any head dim, grouped heads, strided views.

    Its causal mask starts at the top left if s_q != s_k, and an empty sequence kills the process (SIGFPE). It does not
    accept an output.
    """

    name = "cpu"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        check_block(q, k, causal)
        found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return placed(found, out), lse

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        check_block(saved.q, saved.k, causal)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, *saved, 0.0, causal, scale=scale
        )
        return dq, dk, dv


@lru_cache(maxsize=64)  # every layer of a step needs the same boundaries, and making them is a copy to the device
def boundaries_on(cu_seqlens: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Boundaries as an int32 tensor on the device, and the longest document."""
    return numbers_on(cu_seqlens, device), max(stop - start for start, stop in pairwise(cu_seqlens))


def numbers_on(
    numbers: Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
    device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> Tensor:
    """Return whole numbers on the device. They are copied from pinned memory, so that the host need not wait."""
    found = torch.tensor(numbers, dtype=dtype)
    return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)


def placed(found: Tensor, out: Tensor | None) -> Tensor:
    """Return the output of a kernel that does not accept ``out``, copied to ``out`` if that is given."""
    return found if out is None else out.copy_(found)


def check_block(q: Tensor, k: Tensor, causal: bool) -> None:
    s_q, s_k = q.shape[2], k.shape[2]
    if s_q == 0 or s_k == 0:
        raise ValueError(f"an attention block needs tokens on both sides, got s_q {s_q} and s_k {s_k}; skip it")
    if causal and s_q != s_k:
        raise ValueError(
            f"a causal block needs the same tokens on both sides, got s_q {s_q} and s_k {s_k}; "
            "cut it into a full rectangle and a square (memo.attention.blocks)"
        )
