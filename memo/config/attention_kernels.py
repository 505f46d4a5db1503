"""Facts about attention kernels by the names of --attention-backend, for checks and for estimates of time."""

from typing import Literal

DETERMINISTIC_HEAD_DIM = {
    "cpu": 1 << 30,
    "cudnn": 0,
    "flash": 256,
    "flash_attn": 256,
    "flash_attn_3": 192,
    "flash_attn_4": 128,
    "te": 128,
    "torch": 1 << 30,
}
"""The largest head dim whose gradients have the same bits each time under torch.use_deterministic_algorithms; 0: none.

cuDNN has a deterministic backward. TransformerEngine asks for it, but torch does not: torch's choice of a kernel leaves
cuDNN out (check_cudnn_deterministic in ATen/native/transformers/cuda/sdp_utils.cpp). FlashAttention 2 sums the
gradients of queries in as many parts as fill the GPU and then adds the parts in order, which takes more memory.
"""

LARGEST_FUSED_HEAD_DIM = 256
"""The largest head dim of fused kernels on GPUs."""
CAPPING = ("torch", "flash_attn")
"""The kernels that can cap scores (--attn-logit-softcapping)."""
FLASH_2 = ("flash", "flash_attn")
"""FlashAttention 2, written for Ampere: the tensor cores of later GPUs work at a part of their rate."""
FIRST_BEYOND_FLASH_2 = 90
"""The compute capability, times ten, from which other kernels are quicker."""
_FLASH_2_TIMES = {90: 1.9, 100: 3.8, 120: 1.0}
"""How many times as long as cuDNN FlashAttention 2 takes, by the first compute capability, times ten, of each value.

90: measured on one H200 with torch 2.11, forward and backward, causal, bf16, 32,768 tokens, 4 heads of queries and one
of keys, of 128 each: torch's FlashAttention 2 12.816 ms, cuDNN 6.737. Published: 1.6 (forward on H100, heads of 128,
16K tokens: 370 against 595 TFLOP/s; FlashAttention-3, arXiv 2407.08608, figure 5) to 2.3.
100: FlashAttention 2 has no kernels for tensor memory, and runs Ampere's. Chosen by two steps of prime-rl on B200 that
use it without LoRA (Qwen3-4B, 16K tokens): the supervised step says 3.6, the RL step 3.9, once its other work, known
from a pair of steps on H100, is subtracted. Three steps that did not choose the value, of mixtures of experts with LoRA
at 64K tokens, say 4.0 to 4.4. The forward alone is quicker: 330 TFLOP/s at 16K tokens (meta-pytorch/tritonbench, pull
request 171), 3.4.
120: the tensor cores are driven as Ampere's are, and cuDNN is not quicker: 0.88 times as fast on RTX PRO 6000
(huggingface/transformers, pull request 48163).
"""


def flash_2_times(capability: int) -> float:
    """How many times as long as cuDNN FlashAttention 2 takes, forward and backward; 1 where memo takes FlashAttention 2
    anyway.

    The extra time of a deterministic backward is not counted: flash-attn calls it slight, and gives no figure.
    """
    return next((times for first, times in reversed(_FLASH_2_TIMES.items()) if capability >= first), 1.0)


def backend_by_capability(
    capability: int, deterministic: bool = False, capped: bool = False
) -> Literal["cudnn", "flash", "torch"]:
    """The kernels of --attention-backend auto at a compute capability (times ten) without measurements; `capped`:
    whether scores are capped, for which an estimate counts on no package."""
    if capped:
        return "torch"
    return "cudnn" if capability >= FIRST_BEYOND_FLASH_2 and not deterministic else "flash"


def kernels_for(backend: str, head_dim: int) -> str:
    """The kernels of layers with heads of this size where a run uses `backend`: torch's operations for heads that are
    too large for fused kernels on GPUs."""
    return "torch" if head_dim > LARGEST_FUSED_HEAD_DIM and backend != "cpu" else backend


def largest_deterministic(backend: str) -> str:
    """The heads whose gradients have the same bits each time with a backend, for messages."""
    largest = DETERMINISTIC_HEAD_DIM[backend]
    return f"only for heads of up to {largest}" if largest else "never"
