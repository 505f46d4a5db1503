"""Shells of packages that are not here, over stand-ins: the functions' names for arguments, the CPU kernel's results.

A stand-in takes the arguments that the package documents and no others, so a misspelt one is an error.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_reference import assert_accurate, make_inputs
from torch import Tensor

from memo.attention import packages
from memo.attention.backends import AttentionBackend, CpuFlash, Saved, VarlenBackend, placed
from memo.attention.blocks import Chunk, Documents, attention_blocks
from memo.attention.core import attend, attend_backward
from memo.attention.select import select_backend

torch.set_num_threads(1)

S, SCALE, CAP = 32, 0.25, 0.7
WHOLE = (Chunk(0, S, 0),)
CPU = CpuFlash()


def pieces(q: Tensor, boundaries: Tensor | None) -> list[slice]:
    """Of [t, n, d] with boundaries, each document; of [b, s, n, d], all of it."""
    if boundaries is None:
        return [slice(None)]
    assert boundaries.dtype == torch.int32
    return [slice(a, b) for a, b in zip(boundaries.tolist(), boundaries.tolist()[1:], strict=False)]


def kernel_layout(x: Tensor) -> Tensor:
    """[b, s, n, d] or [t, n, d] as [b, n, s, d]."""
    return (x if x.dim() == 4 else x.unsqueeze(0)).transpose(1, 2)


def forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    parts = []
    for rows in pieces(q, ends):
        own = (x if ends is None else x[rows] for x in (q, k, v))
        parts.append(CPU.forward(*map(kernel_layout, own), causal, scale))
    out = torch.cat([part.transpose(1, 2) for part, _ in parts], dim=1)
    lse = torch.cat([part for _, part in parts], dim=-1)
    return (out, lse) if ends is None else (out[0], lse[0])


def backward(
    grad_out: Tensor, saved: Saved, ends: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert saved.lse.is_contiguous()
    parts = []
    for rows in pieces(saved.q, ends):
        own = [kernel_layout(x if ends is None else x[rows]) for x in (grad_out, *saved[:4])]
        lse = saved.lse if ends is None else saved.lse[None, :, rows]
        parts.append(CPU.backward(own[0], Saved(*own[1:], lse), causal, scale))
    dq, dk, dv = (torch.cat([part[i].transpose(1, 2) for part in parts], dim=1) for i in range(3))
    return (dq, dk, dv) if ends is None else (dq[0], dk[0], dv[0])


class Stub:
    """What the stand-ins were told."""

    deterministic: bool | None = None
    outputs: int = 0


@pytest.fixture(scope="module")
def flash_3() -> Iterator[Stub]:
    """The operators of FlashAttention-3, with those of its arguments that we may use."""
    stub, library = Stub(), torch.library.Library("flash_attn_3", "DEF")
    shared = "int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False"
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
        f"Tensor? cu_seqlens_k=None, {shared}, int num_splits=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
        "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        f"{shared}, bool deterministic=False) -> Tensor"
    )

    def fwd(  # type: ignore[no-untyped-def]
        q, k, v, out=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, is_causal=False, num_splits=0,
    ):  # fmt: skip
        assert num_splits == 1 and (cu_seqlens_q is None) == (max_seqlen_q is None)
        stub.outputs += out is not None
        found, lse = forward(q, k, v, cu_seqlens_q, is_causal, softmax_scale)
        return placed(found, out), lse, lse.new_empty(0), lse.new_empty(0)

    def bwd(  # type: ignore[no-untyped-def]
        dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, is_causal=False, deterministic=False,
    ):  # fmt: skip
        stub.deterministic = deterministic
        grads = backward(dout, Saved(q, k, v, out, softmax_lse), cu_seqlens_q, is_causal, softmax_scale)
        for place, grad in zip((dq, dk, dv), grads, strict=True):
            place.copy_(grad)
        return softmax_lse.clone()

    library.impl("fwd", fwd, "CPU")
    library.impl("bwd", bwd, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
        yield stub
    library._destroy()


@pytest.fixture
def flash_4(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub, module = Stub(), types.ModuleType("flash_attn.cute.interface")

    def fwd(  # type: ignore[no-untyped-def]
        q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, return_lse=False, out=None,
    ):  # fmt: skip
        assert return_lse
        stub.outputs += out is not None
        found, lse = forward(q, k, v, cu_seqlens_q, causal, softmax_scale)
        return placed(found, out), lse, None, None

    def bwd(  # type: ignore[no-untyped-def]
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False,
    ):  # fmt: skip
        stub.deterministic = deterministic
        return backward(dout, Saved(q, k, v, out, lse), cu_seqlens_q, causal, softmax_scale)

    module._flash_attn_fwd, module._flash_attn_bwd = fwd, bwd  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    return stub


def check(backend: VarlenBackend, stub: Stub) -> None:
    """Whole, grouped heads, full blocks, packed; the output in its place; determinism as torch is told."""
    packed: Documents = ((0, 1, 12, S), (0, S))
    chunks = (Chunk(16, 16, 0), Chunk(0, 16, 16))
    for dtype in (torch.float64, torch.bfloat16):
        inputs = make_inputs(S, 2, (4, 2), 16, dtype)
        for documents in (None, packed):
            for q_chunks in (WHOLE, chunks):
                order = torch.cat([torch.arange(c.start, c.start + c.length) for c in q_chunks])
                q, k, v, grad_out = inputs[0][order], *inputs[1:3], inputs[3][order]
                scores = attention_blocks(q_chunks, WHOLE, documents)
                place = torch.full_like(q, torch.nan)
                out, lse = attend(backend, q, k, v, scores, SCALE, place)
                assert out.data_ptr() == place.data_ptr()
                dq, dk, dv = attend_backward(backend, grad_out, Saved(q, k, v, out, lse), scores, SCALE)
                back = order.argsort()
                assert_accurate([place[back], dq[back], dk, dv], inputs, documents, SCALE)
    assert stub.outputs > 0 and stub.deterministic is False
    torch.use_deterministic_algorithms(True)
    try:
        attend_backward(backend, grad_out, Saved(q, k, v, out, lse), scores, SCALE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert stub.deterministic is True


def test_flash_attention_3(flash_3: Stub) -> None:
    check(packages.FlashAttn3(), flash_3)


def test_flash_attention_4(flash_4: Stub) -> None:
    check(packages.FlashAttn4(), flash_4)


def test_flash_attn_caps_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in computes by torch's operations what the package is told, forward and backward."""
    module = types.ModuleType("flash_attn.flash_attn_interface")
    by_squares = select_backend("torch", "cpu", softcap=CAP)

    def fwd(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> tuple[Tensor, Tensor]:
        assert told["softcap"] == CAP
        out, lse = by_squares.forward(*map(kernel_layout, (q, k, v)), told["causal"], told["softmax_scale"])
        return out.transpose(1, 2), lse

    def bwd(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *into: Tensor, **told: Any
    ) -> None:
        assert told["softcap"] == CAP
        saved = Saved(*map(kernel_layout, (q, k, v, out)), lse)
        found = by_squares.backward(kernel_layout(grad), saved, told["causal"], told["softmax_scale"])
        for place, part in zip(into, found, strict=True):
            place.copy_(part.transpose(1, 2))

    module._flash_attn_forward, module._flash_attn_backward = fwd, bwd  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, module)
    backend = select_backend("flash_attn", "cuda", softcap=CAP)
    q, k, v, grad = (torch.randn(1, 2, 8, 16) for _ in range(4))

    def results(of: AttentionBackend) -> list[Tensor]:
        out, lse = of.forward(q, k, v, True, SCALE)
        return [out, lse, *of.backward(grad, Saved(q, k, v, out, lse), True, SCALE)]

    assert all(map(torch.equal, results(backend), results(by_squares)))
