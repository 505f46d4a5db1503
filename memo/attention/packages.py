"""CUDA kernels of optional packages behind the interface of backends.py.

A package is imported when its backend is created, not before.

Legend as in backends.py. All backends accept fp16 and bf16 and head dims that are multiples of 8; a VarlenBackend also
accepts packed documents.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memo.attention.backends import AttentionBackend, Saved, VarlenBackend, boundaries_on, placed
from memo.attention.cuda import unused_rng
from memo.errors import ConfigError

_NO_DROPOUT = 0.0


class FlashAttn(VarlenBackend):
    """The flash-attn package, version 2.7 or later of 2.x. Its Python functions do not accept an output."""

    name = "flash_attn"

    def __init__(self) -> None:
        self._lib = _require("flash_attn.flash_attn_interface", "flash_attn", "flash-attn")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d]
        found, lse, *_ = self._lib._flash_attn_forward(q, k, v, **self._options(causal, scale), return_softmax=False)
        return placed(found.transpose(1, 2), out), lse

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        tensors = [x.transpose(1, 2) for x in (grad_out, *saved[:4])]
        dq, dk, dv = grads = _like(tensors[1:4])
        options = {**self._options(causal, scale), "deterministic": torch.are_deterministic_algorithms_enabled()}
        self._lib._flash_attn_backward(*tensors, saved.lse.contiguous(), *grads, **options)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

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
        ends, options = (boundaries, boundaries, longest, longest), self._options(True, scale)
        found, lse, *_ = self._lib._flash_attn_varlen_forward(q, k, v, *ends, **options, return_softmax=False)
        return placed(found, out), lse

    def backward_varlen(
        self, grad_out: Tensor, saved: Saved, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        boundaries, longest = boundaries_on(cu_seqlens, grad_out.device)
        ends, grads = (boundaries, boundaries, longest, longest), _like(saved[:3])
        options = {**self._options(True, scale), "deterministic": torch.are_deterministic_algorithms_enabled()}
        self._lib._flash_attn_varlen_backward(grad_out, *saved[:4], saved.lse.contiguous(), *grads, *ends, **options)
        return grads

    def _options(self, causal: bool, scale: float) -> dict[str, Any]:
        return {
            "dropout_p": _NO_DROPOUT,
            "softmax_scale": scale,
            "causal": causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": self.softcap,
            "alibi_slopes": None,
        }


class _OneFunction(VarlenBackend):
    """A package with one function for forward and one for backward. Both take [b, s, n, d], or packed [t, n, d] with
    boundaries, and accept an output.
    """

    @abstractmethod
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """`options`: scale and boundaries, as keyword arguments that the packages share."""

    @abstractmethod
    def _backward(
        self, grad_out: Tensor, saved: Saved, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d]
        place = None if out is None else out.transpose(1, 2)
        found, lse = self._forward(q, k, v, place, causal, softmax_scale=scale)
        return found.transpose(1, 2), lse

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, *saved[:4]))
        found = self._backward(grad_out, Saved(q, k, v, out, saved.lse.contiguous()), causal, softmax_scale=scale)
        dq, dk, dv = (x.transpose(1, 2) for x in found)
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
        return self._forward(q, k, v, out, True, softmax_scale=scale, **_documents(cu_seqlens, q.device))

    def backward_varlen(
        self, grad_out: Tensor, saved: Saved, cu_seqlens: tuple[int, ...], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved = saved._replace(lse=saved.lse.contiguous())
        return self._backward(grad_out, saved, True, softmax_scale=scale, **_documents(cu_seqlens, grad_out.device))


class FlashAttn3(_OneFunction):
    """FlashAttention-3, for Hopper: the package flash-attn-3 (folder `hopper` of the flash-attention repository).

    It is called through the operators that it registers with torch, which have named arguments and accept an output;
    its Python functions do not.
    """

    name = "flash_attn_3"

    def __init__(self) -> None:
        _require("flash_attn_interface", "flash_attn_3", "flash-attn-3")
        self._ops = torch.ops.flash_attn_3

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        found, lse, *_ = self._ops.fwd(q, k, v, out=out, is_causal=causal, num_splits=1, **options)
        return found, lse

    def _backward(self, grad_out: Tensor, saved: Saved, causal: bool, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        grads, deterministic = _like(saved[:3]), torch.are_deterministic_algorithms_enabled()
        self._ops.bwd(grad_out, *saved, *grads, is_causal=causal, deterministic=deterministic, **options)
        return grads


class FlashAttn4(_OneFunction):
    """FlashAttention-4, for Hopper and Blackwell: the package flash-attn-4. Compiles each kernel at its first call."""

    name = "flash_attn_4"

    def __init__(self) -> None:
        self._lib = _require("flash_attn.cute.interface", "flash_attn_4", "flash-attn-4")

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        found, lse, *_ = self._lib._flash_attn_fwd(q, k, v, causal=causal, return_lse=True, out=out, **options)
        return found, lse

    def _backward(self, grad_out: Tensor, saved: Saved, causal: bool, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        dq, dk, dv, *_ = self._lib._flash_attn_bwd(
            *(*saved[:4], grad_out, saved.lse), causal=causal, deterministic=deterministic, **options
        )
        return dq, dk, dv


class TransformerEngine(AttentionBackend):
    """cuDNN's fused attention in transformer_engine, version 2.0 or later. It does not accept an output."""

    name = "te"

    def __init__(self) -> None:
        package = "transformer_engine[pytorch]"
        self._lib = _require("transformer_engine.pytorch.cpp_extensions.fused_attn", "te", package)
        self._te_dtypes = _require("transformer_engine.pytorch.constants", "te", package).TE_DType

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # [b, s, n, d]
        found, aux = self._lib.fused_attn_fwd(is_training=True, q=q, k=k, v=v, **self._options(q, k, causal, scale))
        return placed(found.transpose(1, 2), out), aux[0].view(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out = (x.transpose(1, 2).contiguous() for x in saved[:4])
        rng_state, _ = unused_rng(q.device)
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


def _require(module: str, backend: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"attention_backend is {backend!r}, but {module} cannot be imported ({error}); "
            f"install {package}, or use 'auto'"
        ) from error


def _like(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous memory for the gradients of q, k and v."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    return dq, dk, dv


def _documents(cu_seqlens: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Boundaries of packed documents, equal for queries and keys, as keyword arguments of FlashAttention 3 and 4."""
    boundaries, longest = boundaries_on(cu_seqlens, device)
    ends = {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
    return {**ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
