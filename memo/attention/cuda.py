"""CUDA kernels behind the interface of backends.py: thin shells, without dropout and without masks.

Legend as in backends.py. All take fp16 and bf16 and head dims that are multiples of 8. Kernels read the
log-sum-exp by pointer, as if contiguous, so slices of a global one are copied first (1 / d of the size of the
output).
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memo.attention.backends import AttentionBackend, Saved, VarlenBackend
from memo.errors import ConfigError

_NO_DROPOUT = 0.0


class CudnnSdpa(AttentionBackend):
    """cuDNN's fused attention through aten. Its backward is not deterministic."""

    name = "cudnn"

    def __init__(self) -> None:
        # cuDNN's statistics are [b, n, s, 1]; some torch versions drop the last dim on the way out and add it
        # back on the way in. The backward must get what the forward gave.
        self._lse_dims = 4

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, _NO_DROPOUT, causal, False, scale=scale
        )
        self._lse_dims = lse.dim()
        return out, lse.view(q.shape[:3])

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        lse = lse.contiguous()
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read only with dropout
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.unsqueeze(-1) if self._lse_dims == 4 else lse,
            seed,
            seed,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            _NO_DROPOUT,
            causal,
            scale=scale,
        )
        return dq, dk, dv


class FlashSdpa(VarlenBackend):
    """FlashAttention-2 as built into torch; deterministic under torch.use_deterministic_algorithms(True)."""

    name = "flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, _NO_DROPOUT, causal, False, scale=scale
        )
        return out, lse

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        rng_state, unused = _flash_rng(q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            _NO_DROPOUT,
            causal,
            rng_state,
            unused,
            scale=scale,
        )
        return dq, dk, dv

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor]:
        boundaries, longest = _boundaries(cu_seqlens, q.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, boundaries, boundaries, longest, longest, _NO_DROPOUT, True, False, scale=scale
        )
        return out, lse

    def backward_varlen(
        self, grad_out: Tensor, saved: Saved, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        boundaries, longest = _boundaries(cu_seqlens, q.device)
        rng_state, unused = _flash_rng(q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            boundaries,
            boundaries,
            longest,
            longest,
            _NO_DROPOUT,
            True,
            rng_state,
            unused,
            scale=scale,
        )
        return dq, dk, dv


class FlashAttn(VarlenBackend):
    """The flash-attn package, version 2.7 or later of the 2.x line."""

    name = "flash_attn"

    def __init__(self) -> None:
        self._lib = _require("flash_attn.flash_attn_interface", "flash_attn", "flash-attn")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d]
        out, lse, *_ = self._lib._flash_attn_forward(q, k, v, **self._options(causal, scale), return_softmax=False)
        return out.transpose(1, 2), lse

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out = (x.transpose(1, 2) for x in saved[:4])
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self._lib._flash_attn_backward(
            grad_out.transpose(1, 2),
            q,
            k,
            v,
            out,
            saved.lse.contiguous(),
            dq,
            dk,
            dv,
            **self._options(causal, scale),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor]:
        boundaries, longest = _boundaries(cu_seqlens, q.device)
        out, lse, *_ = self._lib._flash_attn_varlen_forward(
            q,
            k,
            v,
            boundaries,
            boundaries,
            longest,
            longest,
            **self._options(True, scale),
            return_softmax=False,
        )
        return out, lse

    def backward_varlen(
        self, grad_out: Tensor, saved: Saved, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        boundaries, longest = _boundaries(cu_seqlens, grad_out.device)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])
        self._lib._flash_attn_varlen_backward(
            grad_out,
            *saved[:4],
            saved.lse.contiguous(),
            dq,
            dk,
            dv,
            boundaries,
            boundaries,
            longest,
            longest,
            **self._options(True, scale),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv

    def _options(self, causal: bool, scale: float) -> dict[str, Any]:
        return {
            "dropout_p": _NO_DROPOUT,
            "softmax_scale": scale,
            "causal": causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
        }


class TransformerEngine(AttentionBackend):
    """cuDNN's fused attention as wrapped by transformer_engine, version 2.0 or later."""

    name = "te"

    def __init__(self) -> None:
        package = "transformer_engine[pytorch]"
        self._lib = _require("transformer_engine.pytorch.cpp_extensions.fused_attn", "te", package)
        self._te_dtypes = _require("transformer_engine.pytorch.constants", "te", package).TE_DType

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # [b, s, n, d]
        out, aux = self._lib.fused_attn_fwd(is_training=True, q=q, k=k, v=v, **self._options(q, k, causal, scale))
        return out.transpose(1, 2), aux[0].view(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out = (x.transpose(1, 2).contiguous() for x in saved[:4])
        rng_state, _ = _flash_rng(q.device)
        dq, dk, dv, *_ = self._lib.fused_attn_bwd(
            q=q,
            k=k,
            v=v,
            o=out,
            d_o=grad_out.transpose(1, 2).contiguous(),
            dqkv_dtype=self._te_dtypes[q.dtype],
            aux_ctx_tensors=[saved.lse.contiguous().unsqueeze(-1), rng_state],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._options(q, k, causal, scale),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _options(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> dict[str, Any]:
        (b, s_q), s_k = q.shape[:2], k.shape[1]
        return {
            "max_seqlen_q": s_q,
            "max_seqlen_kv": s_k,
            "cu_seqlens_q": torch.arange(0, (b + 1) * s_q, s_q, dtype=torch.int32, device=q.device),
            "cu_seqlens_kv": torch.arange(0, (b + 1) * s_k, s_k, dtype=torch.int32, device=q.device),
            "fake_dtype": q.dtype,
            "fused_attention_backend": self._lib.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": scale,
            "dropout": _NO_DROPOUT,
            "qkv_layout": "bshd_bshd_bshd",
            "attn_mask_type": "causal" if causal else "no_mask",
        }


def build(name: str) -> AttentionBackend:
    """The CUDA backend called ``name``; raises ConfigError when its package cannot be imported."""
    classes = (CudnnSdpa, FlashSdpa, FlashAttn, TransformerEngine)
    return {cls.name: cls for cls in classes}[name]()


def _require(module: str, backend: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"attention_backend is {backend!r}, but {module} cannot be imported ({error}); "
            f"install {package}, or use 'auto'"
        ) from error


def _flash_rng(device: torch.device) -> tuple[Tensor, Tensor]:
    """Stand-ins for the dropout state that the forward returns: kernels read them only with dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=device)
    return state, state[0]


@lru_cache(maxsize=64)  # every layer of a step asks for the same few; each miss is a copy to the device
def _boundaries(cu_seqlens: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Boundaries as an int32 tensor on the device, and the longest document."""
    longest = max(stop - start for start, stop in pairwise(cu_seqlens))
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device), longest
