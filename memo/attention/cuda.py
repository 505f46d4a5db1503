"""torch's own CUDA kernels behind the interface of backends.py, without dropout and without masks.

Legend as in backends.py. All backends accept fp16 and bf16 and head dims that are multiples of 8. Kernels assume that
the log-sum-exp is contiguous, so slices of a global log-sum-exp are copied first (1 / d of the size of the output).
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo.attention.backends import AttentionBackend, Saved, VarlenBackend, boundaries_on, placed

_NO_DROPOUT = 0.0


class CudnnSdpa(AttentionBackend):
    """cuDNN's fused attention through aten. Its backward is not deterministic, and it does not accept an output.

    It refuses one query with one key ("s_q = s_kv = 1 is not supported", torch 2.11 on an H200), as in a packed
    document of one token: FlashAttention computes these blocks.
    """

    name = "cudnn"

    def __init__(self) -> None:
        # cuDNN's statistics are [b, n, s, 1]; the forward of some versions of torch returns them without the last dim,
        # and their backward expects them like that.
        self._lse_dims = 4
        self._of_one_token = FlashSdpa()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if q.shape[2] == k.shape[2] == 1:
            return self._of_one_token.forward(q, k, v, causal, scale, out)
        found, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, _NO_DROPOUT, causal, False, scale=scale
        )
        self._lse_dims = lse.dim()
        return placed(found, out), lse.view(q.shape[:3])

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        s_q, s_k, lse = saved.q.shape[2], saved.k.shape[2], saved.lse.contiguous()
        if s_q == s_k == 1:
            return self._of_one_token.backward(grad_out, saved, causal, scale)
        lse = lse.unsqueeze(-1) if self._lse_dims == 4 else lse
        seed = torch.zeros((), dtype=torch.int64, device=lse.device)  # read only with dropout
        options = (seed, seed, None, None, None, s_q, s_k, _NO_DROPOUT, causal)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, *saved[:4], lse, *options, scale=scale
        )
        return dq, dk, dv


class FlashSdpa(VarlenBackend):
    """FlashAttention-2 as built into torch; deterministic under torch.use_deterministic_algorithms(True).

    From torch 2.12 on it accepts an output.
    """

    name = "flash"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if out is not None and _flash_into is not None:
            tokens_first = (x.transpose(1, 2) for x in (out, q, k, v))  # [b, s, n, d]
            options = (None, None, q.shape[2], k.shape[2], _NO_DROPOUT, causal, False)
            return out, _flash_into(*tokens_first, *options, scale=scale)
        found, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, _NO_DROPOUT, causal, False, scale=scale
        )
        return placed(found, out), lse

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        lengths = saved.q.shape[2], saved.k.shape[2]
        options = (None, None, *lengths, _NO_DROPOUT, causal, *unused_rng(saved.q.device))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_out, *saved[:4], saved.lse.contiguous(), *options, scale=scale
        )
        return dq, dk, dv

    def forward_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: tuple[int, ...],
        scale: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        boundaries, longest = boundaries_on(cu_seqlens, q.device)
        options = (boundaries, boundaries, longest, longest, _NO_DROPOUT, True, False)
        if out is not None and _flash_into is not None:
            return out, _flash_into(out, q, k, v, *options, scale=scale)
        found, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *options, scale=scale)
        return placed(found, out), lse

    def backward_varlen(
        self, grad_out: Tensor, saved: Saved, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        boundaries, longest = boundaries_on(cu_seqlens, grad_out.device)
        options = (boundaries, boundaries, longest, longest, _NO_DROPOUT, True, *unused_rng(grad_out.device))
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out, *saved[:4], saved.lse.contiguous(), *options, scale=scale
        )
        return dq, dk, dv


_flash_into = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
"""(out, q, k, v, ...) -> lse; older versions of torch do not have it."""


def unused_rng(device: torch.device) -> tuple[Tensor, Tensor]:
    """Tensors in place of the dropout state that the forward returns; kernels read it only with dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=device)
    return state, state[0]
