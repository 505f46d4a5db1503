"""The memory that the MEMO paper (arXiv 2407.12117) counts: skeletal activations, host memory, and its system's GPU.

Skeletal activations of a GPT layer in units of b s h (section 3): input 1, input norm 1, q k v 3, attention output 1,
residual 1, norm 1, fc1 4, GELU 4: 16 in all, in half precision 32 b s h bytes. Input and attention output always move
to the host; of the other 14 units the first share alpha of the tokens moves (section 4.1). The last two layers never
move. `memo.planner.alpha.solve_paper` is the program that chooses alpha.

Known errors: log-sum-exp, RoPE's copies of q and k and gated MLPs are not counted. By the formulas, the full swap of
table 4 at 384K tokens needs 1440 GiB of the 2 TB of a node, but the paper marks it as out of host memory: PyTorch's
pinned allocator rounds each block up to a power of two. `host_bytes(..., powers_of_two=True)` counts this.
"""

from memo.config import ModelConfig, RunConfig
from memo.estimate.rank_memory import RankMemory, worst_rank
from memo.spec.shapes import shape_of
from memo.spec.slots import Moved

UNITS = {
    "input": 1,
    "attention_norm": 1,
    "qkv": 3,
    "attention_out": 1,
    "residual": 1,
    "mlp_norm": 1,
    "fc1": 4,
    "activation": 4,
}
"""Units of b s h in one layer; the tensors in ALWAYS always move."""

ALWAYS = ("input", "attention_out")
RESIDENT_LAYERS = 2
"""The last layers stay, because their backward comes before their rounding buffer is needed again."""

LOGIT_BYTES = 8
"""Bytes for each logit, all of which exist at once: the fp32 logit, and the logit minus its maximum. The paper does not
tell them. Its marks of 7B on 8 GPUs (1,024K tokens run, 1,152K do not) imply 7.3 to 8.3, and the ablation's (640K,
768K) agree."""


def unit_bytes(model: ModelConfig, num_tokens: int, tp: int = 1, cp: int = 1) -> float:
    """b s h in half precision on one GPU; `num_tokens` is b s of the whole sequence."""
    return 2 * num_tokens * model.hidden_size / (tp * cp)


def layer_bytes(model: ModelConfig, num_tokens: int, tp: int = 1, cp: int = 1) -> float:
    """All skeletal activations of one layer on one GPU."""
    return sum(UNITS.values()) * unit_bytes(model, num_tokens, tp, cp)


def always_bytes(model: ModelConfig, num_tokens: int, tp: int = 1, cp: int = 1) -> float:
    """S_input + S_attn of equations 2 and 3."""
    return sum(UNITS[name] for name in ALWAYS) * unit_bytes(model, num_tokens, tp, cp)


def other_bytes(model: ModelConfig, num_tokens: int, tp: int = 1, cp: int = 1) -> float:
    """S_others: the activations of which a share alpha moves."""
    return layer_bytes(model, num_tokens, tp, cp) - always_bytes(model, num_tokens, tp, cp)


def host_bytes(
    model: ModelConfig, num_tokens: int, alpha: float, tp: int = 1, cp: int = 1, *, powers_of_two: bool = False
) -> float:
    """Host memory of one GPU: the left side of equation 3, (n - 2) (S_always + alpha S_others).

    Args:
        powers_of_two: whether each tensor is a pinned block, which PyTorch's allocator rounds up.
    """
    unit = unit_bytes(model, num_tokens, tp, cp)
    blocks = [unit * count * (1.0 if name in ALWAYS else alpha) for name, count in UNITS.items()]
    layer = sum(_next_power_of_two(block) if powers_of_two else block for block in blocks)
    return max(0, model.num_layers - RESIDENT_LAYERS) * layer


def gpu_memory(config: RunConfig, world_size: int, moved: Moved | None) -> RankMemory:
    """Peak of a GPU of the paper's system: memo's estimate, but with a loss that is not chunked.

    With `host_bytes(..., powers_of_two=True)` it reproduces 62 of the 64 marks that the paper prints for MEMO, for full
    recomputation and for full swapping with a memory plan (tables 7 and 4; benchmarks/paper_marks.py has the other
    two).

    Args:
        config: checked, with --device cuda and --offload-policy paper.
        moved: share of the tokens that moves; None: without a swap plan, with the configuration's recomputation.
    """
    shape = shape_of(config.model, "", config.data.seq_length)
    return worst_rank(config, shape, world_size, logit_bytes=LOGIT_BYTES, moved=moved)


def _next_power_of_two(num_bytes: float) -> float:
    """512 -> 512, 513 -> 1024; 0 stays."""
    return 0.0 if num_bytes <= 0 else float(1 << (max(1, int(-(-num_bytes // 1))) - 1).bit_length())
