"""The functions of flash-linear-attention that memo calls, with their shapes and names, in memo's own operations.

Each document is computed by itself."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from memo.attention import delta_rule

CHUNK = 64


def convolve(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor,
    activation: str,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, None]:
    """x [B, T, D], weight [D, W], initial_state [N, D, W]: the previous tokens; the first of them is not read."""
    assert activation == "silu"
    assert initial_state.shape[1:] == weight.shape
    found = []
    for tokens, before in zip(_documents(x, cu_seqlens, chunk_indices), initial_state, strict=True):
        met = torch.cat((before[:, 1:].mT, tokens.to(before.dtype)))
        taps = weight.to(before.dtype).unbind(1)
        found.append(F.silu(sum(met[i : i + len(tokens)] * tap for i, tap in enumerate(taps))))
    return torch.cat(found).view(x.shape).to(x.dtype), None


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k [B, T, H, K], v [B, T, HV, K], g and beta [B, T, HV], initial_state [N, HV, K, K]."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    shared, wide = v.shape[2] // q.shape[2], initial_state.dtype
    inputs = (_documents(x, cu_seqlens, chunk_indices) for x in (q, k, v, beta, g))
    outs, states = [], []
    for state, *parts in zip(initial_state, *inputs, strict=True):
        queries, keys, values, betas, decays = (x.to(wide).unsqueeze(1) for x in parts)
        queries, keys = (delta_rule._normed(x).repeat_interleave(shared, dim=2) for x in (queries, keys))
        positions = torch.arange(1, len(values) + 1, device=values.device).unsqueeze(
            0
        )  # each reads the values from before the call
        given = (queries * scale, keys, values, betas, decays, positions, state.unsqueeze(0))
        out, after = delta_rule._rule(*given)
        outs.append(out.squeeze(1))
        states.append(after)
    return torch.cat(outs).view(v.shape).to(v.dtype), torch.cat(states)


def _documents(x: Tensor, cu_seqlens: Tensor | None, chunk_indices: Tensor | None) -> list[Tensor]:
    if cu_seqlens is None:
        return list(x)
    assert chunk_indices is not None
    bounds = list(pairwise(cu_seqlens.tolist()))
    chunks = [[n, i] for n, (start, stop) in enumerate(bounds) for i in range(-(-(stop - start) // CHUNK))]
    assert chunk_indices.tolist() == chunks
    return [x[0, start:stop] for start, stop in bounds]
