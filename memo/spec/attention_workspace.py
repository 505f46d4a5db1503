"""Workspace of a kernel of attention: device memory that its backward asks torch's allocator for, beside the results.

All kernels sum dq in fp32 and keep the sums of the softmax's gradient, one for each row of queries. Where query heads
share keys and values (n > n_kv), they add up dk and dv over the query heads. Forwards ask for nothing of this size.

    cudnn, te     what torch or transformer_engine allocates for cuDNN's graph. dq and the sums are tensors of NVIDIA's
                  cudnn-frontend (include/cudnn_frontend/node/scaled_dot_product_flash_attention.h, version 1.23;
                  pytorch's ATen/native/cudnn/MHA.cpp, run_cudnn_SDP_bprop, allocates them). dk and dv of all query
                  heads are tensors of the same graph, in q's dtype, in memory of cuDNN's engine. No source states how
                  much memory that is. Here it is the size of the tensors, which is also what the open kernels take that
                  replace the engine on some GPUs (pull request 557 of cudnn-frontend)
    flash,        FlashAttention 2, in torch and as a package: csrc/flash_attn/flash_api.cpp, mha_bwd. dk and dv are of
    flash_attn    all query heads, in q's dtype
    flash_attn_3, hopper/flash_api.cpp, mha_bwd, and flash_attn/cute/interface.py, _flash_attn_bwd. The log-sum-exp is
    flash_attn_4  rescaled into a second tensor of sums; dk and dv are summed in fp32 for each key/value head

FlashAttention's kernels round rows up to blocks of at most 128 rows, and head dims up to the sizes for which they are
compiled. None of this was measured on a GPU. FlashAttention's semaphores (an integer a block) are not counted.

A deterministic backward of FlashAttention 2 sums dq in several parts that keep the GPU full, and holds all of them:
multiprocessors / (sequences x heads) parts, rounded up (flash_api.cpp, the same function).
"""

import math
from typing import NamedTuple

from memo.config.attention_kernels import FLASH_2
from memo.units import round_up

_FP32 = 4
_BLOCK_ROWS = 128
_FLASH_3_HEAD_DIMS = (64, 96, 128, 192, 256)
_MULTIPROCESSORS = 148
"""Multiprocessors of B200, the most of all GPUs that memo knows; an H100 has 132."""
MOST_DOCUMENTS = 64
"""Packed documents in one call of a kernel, at most. FlashAttention's workspace has up to 128 rows more for each
document, so that without a limit thousands of short documents would need several times the memory of a long one."""
SINK_TOKENS = 4096
"""Tokens of all sequences to which sinks are joined at a time (memo.attention.sinks): enough to fill a device."""

_SQUARES = 1 << 25
"""Scores of all heads that torch's operations compute at a time: 128 MB in fp32."""


def square_tokens(heads: int) -> int:
    """Queries, and keys, of a square of the scores of `heads` heads of all sequences (memo.attention.squares)."""
    return max(64, math.isqrt(_SQUARES // heads) // 64 * 64)


class AttentionCall(NamedTuple):
    """Sizes of one call of a kernel: numbers of sequences, of queries and keys of each, of heads, and bytes of an
    element."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int


def backward_workspace(backend: str, call: AttentionCall, deterministic: bool = False) -> dict[str, int]:
    """{name: bytes} that live at once during the backward of a CUDA backend, in one request or several."""
    rows, head_dim, sums = call.queries, call.head_dim, 1
    if backend not in ("cudnn", "te"):
        rows, head_dim = round_up(rows, _BLOCK_ROWS), _compiled_head_dim(backend, head_dim)
    if backend in ("flash_attn_3", "flash_attn_4"):
        sums = 2
    of_queries = call.batch * call.heads * rows * _FP32
    parts = -(-_MULTIPROCESSORS // (call.batch * call.heads)) if deterministic and backend in FLASH_2 else 1
    workspace = {"fp32 dq": parts * of_queries * head_dim, "attention sums": sums * of_queries}
    if call.heads > call.kv_heads:
        workspace["dk and dv to add up"] = 2 * _shared_keys_bytes(backend, call, head_dim)
    return workspace


def squares_bytes(call: AttentionCall, wide: int, on_cuda: bool, causal: bool, backward: bool) -> int:
    """Bytes of memo.attention.squares beside its results; `wide`: bytes of an element of sums.

    They are the scores of a square, in a backward three times, a GPU's narrow copy of them, the mask, the sums of
    outputs or of gradients, and copies of queries and keys that are not views."""
    side, narrow = square_tokens(call.batch * call.heads), call.element_bytes
    rows, columns = min(side, call.queries), min(side, call.keys)
    heads, kv_heads, is_mixed = call.batch * call.heads, call.batch * call.kv_heads, narrow < wide
    of_queries, of_keys = heads * rows * call.head_dim, kv_heads * columns * call.head_dim
    scores, statistics = heads * rows * columns, 5 * heads * rows * wide
    folded = narrow * (of_queries * (call.batch > 1 or heads > kv_heads) + of_keys * (call.batch > 1))
    cast = wide * (of_queries + of_keys) if is_mixed and not on_cuda else 0
    if backward:
        work = 3 * scores * wide + 2 * folded + cast + statistics
        if not is_mixed:
            return work
        results = (heads * call.queries + 2 * kv_heads * call.keys) * call.head_dim
        return results * wide + max(0, work - results * narrow)  # results are made when all sums are done
    copy = scores * narrow if is_mixed and on_cuda else 0
    parts = max(folded + cast + rows * columns * causal, copy + 2 * of_queries * wide)
    return scores * wide + of_queries * wide + parts + statistics


def padding_rows(backend: str) -> int:
    """The most rows of queries with which the workspace of a call for packed documents exceeds its tokens."""
    return 0 if backend in ("cudnn", "te") else MOST_DOCUMENTS * _BLOCK_ROWS


def _shared_keys_bytes(backend: str, call: AttentionCall, head_dim: int) -> int:
    """Bytes of dk or of dv before it is added up over query heads."""
    if backend in ("flash_attn_3", "flash_attn_4"):
        return call.batch * call.kv_heads * round_up(call.keys, _BLOCK_ROWS) * head_dim * _FP32
    return call.batch * call.heads * call.keys * call.head_dim * call.element_bytes


def _compiled_head_dim(backend: str, head_dim: int) -> int:
    if backend == "flash_attn_3":
        return next((compiled for compiled in _FLASH_3_HEAD_DIMS if compiled >= head_dim), head_dim)
    return round_up(head_dim, 64 if head_dim > 128 and backend != "flash_attn_4" else 32)
