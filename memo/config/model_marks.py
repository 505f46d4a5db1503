"""Marks of the fields of a model (memo.config.model): the fields with which others are read, and a range."""

from memo.artifacts.fields import in_range
from memo.config.flag import ReadWith
from memo.config.layer_words import FULL, LINEAR, SLIDING

_BEFORE, _AFTER = ("attention_norm", "mlp_norm"), ("attention_out_norm", "mlp_out_norm")
NORMS: dict[str, tuple[str, ...]] = {"before": _BEFORE, "around": (*_BEFORE, *_AFTER), "after": _AFTER}
"""Norms of hidden states in a layer, by --norm-placement."""
INTO_EXPERTS = ("experts_norm", "router_norm")
OF_EXPERTS = (*INTO_EXPERTS, "shared_out_norm", "experts_out_norm")
"""The norms of --moe-separate-norms, besides those of its placement."""
FACTOR = in_range(above=0, high=10**9)
LATENT = ReadWith("multi_latent_attention", use="--multi-latent-attention")
ROTATED = ReadWith("position_embedding_type", ("rope",))
STRETCHED = ReadWith("rope_scaling_type", ("linear", "llama3", "yarn", "longrope"))
LLAMA3, YARN = ReadWith("rope_scaling_type", ("llama3",)), ReadWith("rope_scaling_type", ("yarn",))
LONGROPE = ReadWith("rope_scaling_type", ("longrope",))
FROM_LENGTH = ReadWith("rope_scaling_type", ("llama3", "yarn", "longrope"))
SCALED = ReadWith("rope_scaling_type", ("yarn", "longrope"))
BY_LAYER = ReadWith("layer_types", use=f"--layer-types {SLIDING},{FULL}")
DELTA_NET = ReadWith("layer_types", (LINEAR,), use=f"--layer-types {LINEAR},{FULL}")
ROUTED = ReadWith("num_experts", use="--num-experts 8")
SHARED = ReadWith("moe_shared_expert_intermediate_size", use="--moe-shared-expert-intermediate-size 512")
SIGMOID = ReadWith("moe_router_score_function", ("sigmoid",))
LORA = ReadWith("lora_rank", use="--lora-rank 16")
RMS = ReadWith("normalization", ("RMSNorm",))
