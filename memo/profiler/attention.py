"""Times attention kernels on the device that will train: forward and backward of one call, by backend and case.

Each case runs with the code of training (memo.attention.core), so a backend that does not accept packed documents is
timed document by document. A backend must also agree with a dense softmax on a short sequence.

Legend: s tokens, b batch, n query heads, n_kv key/value heads, d head dim.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

import torch
from torch import Tensor

from memo.artifacts.attention_table import AttentionCase, AttentionRow
from memo.attention.backends import AttentionBackend, Saved
from memo.attention.blocks import Chunk, Documents, ScoreBlock, Scores, attention_blocks
from memo.attention.core import attend, attend_backward
from memo.attention.select import CUDA_BACKENDS, is_installed, select_backend
from memo.parallel.dtypes import torch_dtype
from memo.profiler.layer import median_s
from memo_kernels import wide_dtype

_NUM_DOCUMENTS = 8
"""Number of documents of a packed case, which are of equal length."""
_CHECKED_TOKENS = 256


def time_attention(
    cases: Iterable[AttentionCase], heads: int, kv_heads: int, batch: int, device: torch.device
) -> tuple[AttentionRow, ...]:
    """Return a row for each case, with the seconds of every backend of the device, or why the backend is unusable.

    If a kernel raises any error, such as lack of memory, it is unusable for that case alone.
    """
    names = ("cpu",) if device.type == "cpu" else CUDA_BACKENDS
    rows = tuple(_row(case, names, heads, kv_heads, batch, device) for case in cases)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # return the memory of the measurements to the device
    return rows


def _row(
    case: AttentionCase, names: Sequence[str], heads: int, kv_heads: int, batch: int, device: torch.device
) -> AttentionRow:
    seconds: dict[str, float] = {}
    unusable: dict[str, str] = {}
    for name in names:
        if name != "cpu" and not is_installed(name):
            unusable[name] = "it is not installed"
            continue
        try:
            backend = select_backend(name, device.type)
            error = _error(backend, case, heads, kv_heads, device)
            if error > 1.0:
                unusable[name] = f"its results are {error:.1f} times as far from a dense softmax as may be"
                continue
            seconds[name] = _seconds(backend, case, heads, kv_heads, batch, device)
        except Exception as error:  # other packages may raise any class
            unusable[name] = (str(error).splitlines() or [type(error).__name__])[0]
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return AttentionRow(case, heads, kv_heads, batch, now, seconds, unusable)


def _seconds(
    backend: AttentionBackend, case: AttentionCase, heads: int, kv_heads: int, batch: int, device: torch.device
) -> float:
    """Seconds of one forward, which writes its output to a given buffer, and one backward."""
    inputs = _inputs(case, case.tokens, heads, kv_heads, batch, device)
    scores, out = _scores(case, case.tokens, batch), torch.empty_like(inputs[0])
    return median_s(lambda: _run(backend, inputs, scores, out), device)


def _run(backend: AttentionBackend, inputs: list[Tensor], scores: Scores, out: Tensor) -> list[Tensor]:
    """Run forward and backward; returns [out, dq, dk, dv]."""
    q, k, v, grad_out = inputs
    scale = q.shape[-1] ** -0.5
    _, lse = attend(backend, q, k, v, scores, scale, out)
    return [out, *attend_backward(backend, grad_out, Saved(q, k, v, out, lse), scores, scale)]


def _error(backend: AttentionBackend, case: AttentionCase, heads: int, kv_heads: int, device: torch.device) -> float:
    """The largest error of output and gradients, in units of the allowed rounding error: 4 ulp of the largest value."""
    tokens = min(case.tokens, _CHECKED_TOKENS)
    inputs = _inputs(case, tokens, heads, kv_heads, 1, device)
    found = _run(backend, inputs, _scores(case, tokens, 1), torch.empty_like(inputs[0]))
    allowed = max(4 * torch.finfo(inputs[0].dtype).eps, 1e-5)
    ratios = []
    for value, true in zip(found, _dense(case, inputs), strict=True):
        error = (value.to(true.dtype) - true).abs().max() / true.abs().max()
        ratios.append(float("inf") if error.isnan() else error.item() / allowed)
    return max(ratios)


def _dense(case: AttentionCase, inputs: list[Tensor]) -> list[Tensor]:
    """Return [out, dq, dk, dv] of a materialised softmax, in fp32 or wider."""
    wide = wide_dtype(inputs[0].dtype)
    q, k, v, grad_out = (x.to(wide).permute(1, 2, 0, 3) for x in inputs)  # [b, n, s, d]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    with torch.enable_grad():
        q, k, v = leaves[0], *(x.repeat_interleave(group, 1) for x in leaves[1:])
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~_visible(case, q), -torch.inf)
        out = scores.softmax(-1) @ v
        grads = torch.autograd.grad(out, leaves, grad_out)
    return [x.permute(2, 0, 1, 3) for x in (out.detach(), *grads)]


def _visible(case: AttentionCase, q: Tensor) -> Tensor:
    """The attention mask, bool [s, s]."""
    tokens = q.shape[2]
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    if not case.causal:
        return mask
    documents = _documents(case, tokens, 1)
    ends = torch.tensor(documents[0][1:] if documents else (tokens,), device=q.device)
    document = torch.bucketize(torch.arange(tokens, device=q.device), ends, right=True)
    return mask.tril() & (document[:, None] == document[None, :])


def _inputs(
    case: AttentionCase, tokens: int, heads: int, kv_heads: int, batch: int, device: torch.device
) -> list[Tensor]:
    """q, k, v, grad_out as [s, b, heads, d], the first three views of one tensor, as a layer has them."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(width: int) -> Tensor:
        shape = (tokens, batch, width, case.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(torch_dtype(case.dtype))

    q, k, v = normal(heads + 2 * kv_heads).split([heads, kv_heads, kv_heads], dim=2)
    return [q, k, v, normal(heads)]


def _scores(case: AttentionCase, tokens: int, batch: int) -> Scores:
    if not case.causal:
        return Scores((ScoreBlock(None, 0, tokens, 0, tokens, False),))
    whole = (Chunk(0, tokens, 0),)
    return attention_blocks(whole, whole, _documents(case, tokens, batch))


def _documents(case: AttentionCase, tokens: int, batch: int) -> Documents | None:
    if not case.packed:
        return None
    count = min(_NUM_DOCUMENTS, tokens)
    return (tuple(tokens * i // count for i in range(count + 1)),) * batch
