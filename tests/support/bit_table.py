"""The table of tests/executor/test_bits.py: rows of models and layouts, and the ways to run their steps.

Ways combine kinds of data that move: activations (by any share and policy), keys and values, inputs of layers that
recompute attention, hidden states, records on a disk, and states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from custom_layers import PARALLEL, SANDWICH
from streamed_steps import ALL, PLACEMENTS
from swapped_steps import Copies

TILES, STEPS = 4, 3
TRAINING: dict[str, Any] = {"clip_grad": 0.04, "lr_warmup_iters": 1, "lr_decay_iters": STEPS, "min_lr": 1e-3}
TRAINING |= {"lr_decay_style": "cosine", "train_iters": STEPS, "ddp_bucket_size": 2000, "profile_cache": "off"}

# On one stage a layer moves only if there are at least three; a pipeline needs two layers on each stage.
ONE_STAGE: dict[str, Any] = {"num_layers": 3, "global_batch_size": 1}
TWO_STAGES: dict[str, Any] = {"pp": 2, "num_layers": 4, "global_batch_size": 3}
UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
CAPS: dict[str, Any] = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3}
KINDS: dict[str, Any] = {"window_size": 11, "layer_types": "sliding,full", "attention_sinks": True}
KINDS |= {"attention_output_gate": True}
SCALED: dict[str, Any] = {"rope_scaling_type": "yarn", "rope_llama_4_scaling_beta": 0.3}
SCALED |= {"rope_original_max_position_embeddings": 8}
"""Queries have a table of RoPE of their own."""
DENSE_FIRST: dict[str, Any] = {"moe_layer_freq": "[0]+[1]*2", "ffn_hidden_size": 176, "moe_ffn_hidden_size": 48}
DENSE_FIRST |= {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True, "rotary_percent": 0.5}
"""Layers that differ in their weights, and in their rows in a slot."""
WITHOUT_LATENT: dict[str, Any] = {"q_lora_rank": None, "moe_layer_freq": "", "v_head_dim": 12}
FROZEN: dict[str, Any] = {"freeze": "*embedding.weight,layers.1.*,*mlp.fc2*"}
GATHERED, EXCHANGED = ({"cp": 2, "cp_comm_type": kind} for kind in ("all_gather", "a2a"))

Reference = Literal["plain", "whole", "swept"]
REFERENCES: dict[Reference, dict[str, Any]] = {
    "plain": {"offload_alpha": "off"},
    "whole": {"offload_alpha": 0.0},
    "swept": {"offload_alpha": 0.0, "offload_granularity": "tile"},
}


@dataclass(frozen=True)
class Way:
    """One way to run the steps of a reference."""

    of: Reference
    values: dict[str, Any]
    copies: Copies = "lazy"
    disk: float = 0.0
    """Share of the records of each kind that are on a disk."""


def whole(alpha: float, policy: str, copies: Copies, disk: float = 0.0, **more: Any) -> Way:
    return Way("whole", {"offload_alpha": alpha, "offload_policy": policy, **more}, copies, disk)


def swept(
    slot_tiles: int, alpha: float, policy: str, copies: Copies, again: int = 0, disk: float = 0.0, **more: Any
) -> Way:
    """`again`: number of layers of a stage that recompute attention, at most all of its layers."""
    values = {"offload_alpha": alpha, "offload_policy": policy, "offload_slot_tiles": slot_tiles}
    return Way("swept", {**values, "recompute_attention_layers": again, **more}, copies, disk)


HIDDEN: dict[str, Any] = {"offload_hidden_states": True}
ONE_TILE: dict[str, Any] = {"offload_tiles": 1, "offload_policy": "paper"}
WAYS: tuple[Way, ...] = (
    Way("plain", {"recompute_granularity": "full", **PLACEMENTS["optimizer"]}),
    whole(0.25, "auto", "lazy", disk=1.0),
    swept(1, 0.0, "auto", "lazy"),
    Way("plain", {"offload_alpha": 1.0, **ONE_TILE, **PLACEMENTS["fractions"]}, "random"),
    whole(0.5, "paper", "random", **PLACEMENTS["fractions"]),
    swept(1, 1.0, "auto", "random", again=1, disk=1.0, **HIDDEN),
    Way("plain", {"recompute_granularity": "selective", **PLACEMENTS["no weight copy"]}, "threads"),
    whole(1.0, "auto", "threads", disk=0.5, **PLACEMENTS["no weight copy"]),
    swept(2, 0.5, "auto", "lazy", again=3, **HIDDEN, **ALL),
    Way("plain", {"offload_alpha": 0.0, **ONE_TILE, **ALL}),
    whole(0.0, "paper", "random", **ALL),
    swept(2, 0.25, "paper", "random", again=1, disk=0.5, **PLACEMENTS["fractions"]),
    Way("plain", ALL, "random"),
    whole(1.0, "paper", "lazy", **PLACEMENTS["optimizer"]),
    swept(4, 0.5, "auto", "threads", **PLACEMENTS["no weight copy"]),
    Way("plain", PLACEMENTS["fractions"], "threads"),
    whole(0.5, "auto", "threads", disk=1.0, **ALL),
    swept(2, 1.0, "paper", "lazy", again=2, **HIDDEN, **PLACEMENTS["optimizer"]),
)
"""Ways in groups of three, one way of each reference."""
ZEROS = {"ZeRO-2": "optim_grads", "ZeRO-3": "optim_grads_params"}
HELD: tuple[tuple[dict[str, Any], Copies], ...] = (
    ({"offload_states": "none"}, "lazy"),
    (ALL, "random"),
    (PLACEMENTS["fractions"], "threads"),
)
SHARDED: tuple[Way, ...] = tuple(
    Way("plain", {"data_parallel_sharding_strategy": zero, **held}, copies)
    for zero in ZEROS.values()
    for held, copies in HELD
)


@dataclass(frozen=True)
class Row:
    world_size: int
    model: str
    values: dict[str, Any]
    ways: Sequence[Way] | None = None
    """The ways of the row; None: a share of all ways."""
    refuses: tuple[Reference, ...] = ()
    """References with ways that the row cannot run, or that it runs with other roundings."""
    is_full: bool = False
    tiles: int = TILES


EVERY_WAY, IN_FP32 = "gpt", "frozen layers"
WHOLE_ONLY: tuple[Reference, ...] = ("swept",)
ROWS: dict[str, Row] = {
    EVERY_WAY: Row(1, "gpt-tiny", {**ONE_STAGE, "micro_batch_size": 2, "global_batch_size": 4}, WAYS),
    "gpt2": Row(1, "gpt2-tiny", ONE_STAGE),  # biases, LayerNorm, learned positions
    "qwen3": Row(1, "qwen3-tiny", ONE_STAGE),  # normed heads: the slot holds them unrotated, the store rotated
    "window": Row(
        1, "llama-tiny", {**ONE_STAGE, "window_size": 5}, tiles=2 * TILES
    ),  # shorter than a tile; fewer key/value heads
    "layers of two kinds": Row(1, "llama-tiny", {**ONE_STAGE, **KINDS, **SCALED, "no_rope_freq": "[0,1,0]"}),
    "norms around": Row(1, "gemma-3-tiny", {**ONE_STAGE, "window_size": 11}, tiles=2 * TILES),  # longer than a tile
    "caps": Row(1, "gemma-2-tiny", {**ONE_STAGE, "window_size": 11, **CAPS}),
    "heads by layer, norms of experts": Row(1, "gemma-4-moe-tiny", {**ONE_STAGE, "window_size": 11}),
    "norms after": Row(1, "olmo-3-tiny", {**ONE_STAGE, "window_size": 11}),
    "delta nets": Row(
        1, "qwen3.5-tiny", {**ONE_STAGE, "num_layers": 4, "layer_types": "full,linear,linear,full"}
    ),  # the first layer is not the first to recompute attention
    "experts": Row(1, "qwen3-moe-tiny", ONE_STAGE),
    "experts in some layers, adapters": Row(1, "qwen3-moe-tiny", {**ONE_STAGE, **DENSE_FIRST, "lora_rank": 3}),
    "breadth first": Row(
        1, "llama-tiny", {**ONE_STAGE, "gradient_accumulation_order": "breadth_first", "global_batch_size": 2}
    ),
    "4 bits": Row(1, "qwen3-tiny", {**ONE_STAGE, "lora_rank": 3, "quantize": "nf4"}),
    "8 bits": Row(1, "llama-tiny", {**ONE_STAGE, "lora_rank": 3, "quantize": "int8", "global_batch_size": 2}),
    IN_FP32: Row(1, "gpt2-tiny", {**ONE_STAGE, **FROZEN}),
    # Its two halves round otherwise than the whole, so a plain way may not cut it.
    "custom layer": Row(1, "llama-tiny", {**ONE_STAGE, "custom_layer": PARALLEL}, WAYS[-3:]),
    "custom layer of two halves": Row(
        1, "llama-tiny", {**ONE_STAGE, "custom_layer": SANDWICH}, refuses=("plain",), is_full=True
    ),
    "tp2": Row(2, "llama-tiny", {"tp": 2, **ONE_STAGE}, is_full=True),
    "tp2 norms across heads": Row(2, "olmo-3-tiny", {"tp": 2, **ONE_STAGE, "window_size": 11}, is_full=True),
    "tp2 experts by sigmoid": Row(
        2, "glm-4.5-tiny", {"tp": 2, **ONE_STAGE, "moe_layer_freq": "[0]+[1]*2"}, is_full=True
    ),
    "tp2 experts with biases": Row(2, "gpt-oss-tiny", {"tp": 2, **ONE_STAGE, "window_size": 11}),
    "tp2 delta nets": Row(2, "qwen3.5-tiny", {"tp": 2, **ONE_STAGE, "num_layers": 4}, is_full=True),
    "tp2 frozen layers": Row(2, "gpt2-tiny", {"tp": 2, **ONE_STAGE, **FROZEN, "global_batch_size": 2}, is_full=True),
    "tp2 custom layer": Row(
        2, "llama-tiny", {"tp": 2, **ONE_STAGE, "custom_layer": PARALLEL}, refuses=("plain",), is_full=True
    ),
    "cp2 ring": Row(2, "llama-tiny", {"cp": 2, "cp_comm_type": "p2p", **ONE_STAGE, **KINDS}, refuses=WHOLE_ONLY),
    "cp2 gathered": Row(2, "llama-tiny", {**GATHERED, **ONE_STAGE, **KINDS, "no_rope_freq": "[0,0,1]"}),
    "cp2 gathered, window": Row(2, "llama-tiny", {**GATHERED, **ONE_STAGE, "window_size": 11}, is_full=True),
    "cp2 exchanged": Row(2, "qwen3-tiny", {**EXCHANGED, **ONE_STAGE, "window_size": 17, "num_query_groups": 4}),
    "cp2 exchanged, delta nets": Row(
        2, "qwen3.5-tiny", {**EXCHANGED, **ONE_STAGE, "num_layers": 4, "layer_types": "full,linear,linear,full"}
    ),
    "pp2 1F1B": Row(2, "gpt-tiny", TWO_STAGES),  # its embedding is tied over both stages
    "pp2 window": Row(2, "llama-tiny", {**TWO_STAGES, "window_size": 5}, is_full=True),
    "pp2 interleaved": Row(2, "llama-tiny", {"vpp": 2, **TWO_STAGES, "global_batch_size": 4, **UNTIED}),
    "dp2, moments in bf16": Row(
        2,
        "gpt-tiny",
        {
            **ONE_STAGE,
            "global_batch_size": 4,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
    ),
    "dp2, experts in some layers": Row(2, "qwen3-moe-tiny", {**ONE_STAGE, **DENSE_FIRST, "global_batch_size": 2}),
    "dp2, adapters": Row(2, "qwen3-tiny", {**ONE_STAGE, "global_batch_size": 4, "lora_rank": 3}, is_full=True),
    "dp2, sharded": Row(2, "llama-tiny", {**ONE_STAGE, "global_batch_size": 2}, SHARDED),
    "tp2 cp2 gathered": Row(
        4, "gpt-tiny", {"tp": 2, **GATHERED, **ONE_STAGE}, WAYS[-1:]
    ),  # the way that other layouts leave
    "tp2 cp2 exchanged, adapters": Row(
        4, "qwen3-tiny", {"tp": 2, **EXCHANGED, **ONE_STAGE, "lora_rank": 3, "num_query_groups": 4}, is_full=True
    ),
    "tp2 cp2 norms across heads": Row(
        4, "olmo-3-tiny", {"tp": 2, **EXCHANGED, **ONE_STAGE, "window_size": 11, "num_query_groups": 4}, is_full=True
    ),
    "cp4 gathered": Row(4, "gpt-tiny", {**GATHERED, **ONE_STAGE, "cp": 4}, is_full=True),
    "cp2 pp2 gathered": Row(4, "gpt2-tiny", {**GATHERED, **TWO_STAGES}, is_full=True),
    "cp2 pp2 exchanged": Row(4, "llama-tiny", {**EXCHANGED, **TWO_STAGES, **KINDS}, is_full=True),
    "cp2 dp2 gathered": Row(4, "llama-tiny", {**GATHERED, **ONE_STAGE, "global_batch_size": 4}, is_full=True),
    "pp2 dp2, experts in some layers": Row(
        4,
        "qwen3-moe-tiny",
        {**TWO_STAGES, **DENSE_FIRST, "moe_layer_freq": "[0]*3+[1]", "global_batch_size": 4},
        is_full=True,
    ),
    "tp2 cp2 pp2": Row(8, "llama-tiny", {"tp": 2, **GATHERED, **TWO_STAGES, **KINDS}, is_full=True),
    "tp2 pp2 dp2": Row(8, "gpt2-tiny", {"tp": 2, **TWO_STAGES, "global_batch_size": 4}, is_full=True),
    "multi-latent attention": Row(
        1,
        "deepseek-tiny",
        {**ONE_STAGE, "moe_layer_freq": "[0]+[1]*2", "moe_router_topk": 8, "moe_router_group_topk": 4},
    ),  # all experts, because another rounding may choose others
    "tp2 queries without a latent": Row(2, "deepseek-tiny", {"tp": 2, **ONE_STAGE, **WITHOUT_LATENT, **SCALED}),
    "cp2 exchanged, multi-latent attention": Row(
        2, "deepseek-tiny", {**EXCHANGED, **ONE_STAGE, "moe_layer_freq": "[0]*2+[1]", "lora_rank": 3}, is_full=True
    ),
}
