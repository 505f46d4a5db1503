"""Models by name: the paper's, published ones, and tiny ones of each family for tests.

Sources: MEMO table 2 (gpt-7b .. gpt-65b); for all other models the published config.json: for Qwen2.5 of the -Instruct
models, for Mistral 7B of v0.3, for Mistral Small of 2501. The keys that the models of a series share are in
memo/config/preset_series.py; the model's family supplies all other fields (memo.config.hugging_face_families).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec

from memo.config import preset_series as of
from memo.config.hugging_face import model_of
from memo.config.model import ModelConfig
from memo.lazy_mapping import LazyMapping

_Keys = Mapping[str, Any]
_Arguments = ParamSpec("_Arguments")


def _later(make: Callable[_Arguments, ModelConfig]) -> Callable[_Arguments, Callable[[], ModelConfig]]:
    """Delay `make` until the model is asked for."""
    return partial(partial, make)


@_later
def _paper_gpt(num_layers: int, hidden_size: int, heads: int) -> ModelConfig:
    """Return a GPT of the paper, with P = 12 n h^2 + v h: tied embedding, no biases, no position table (rotary)."""
    return ModelConfig(num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads, vocab_size=50257)


@_later
def _sized(family: _Keys, layers: int, hidden: int, heads: int, groups: int, ffn: int, **others: Any) -> ModelConfig:
    """Return a model of a family in these sizes; `ffn` is the width of one expert in a family with experts."""
    width = "moe_intermediate_size" if "num_experts" in family else "intermediate_size"
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return model_of({**family, **sizes, "num_key_value_heads": groups, width: ffn, **others}, "preset")


@_later
def _tiny(family: _Keys, ffn: int = 352, **others: Any) -> ModelConfig:
    """Return a model of four layers with four heads, whose vocabulary is taken from the data."""
    model = _sized(family, 4, 128, 4, 2, ffn, **{"vocab_size": 1, **others})()
    return replace(model, vocab_size=None, kv_channels=others.get("head_dim"))


_MADE: dict[str, Callable[[], ModelConfig]] = {
    "gpt-tiny": ModelConfig,
    "gpt-7b": _paper_gpt(32, 4096, 32),
    "gpt-13b": _paper_gpt(40, 5120, 40),
    "gpt-30b": _paper_gpt(48, 7168, 56),
    "gpt-65b": _paper_gpt(80, 8192, 64),
    "gpt2-tiny": partial(
        ModelConfig,
        activation="gelu_tanh",
        position_embedding_type="learned_absolute",
        add_bias_linear=True,
    ),
    "llama-tiny": _tiny(of.LLAMA),
    "tinyllama-1.1b": _sized(of.LLAMA_2, 22, 2048, 32, 4, 5632, max_position_embeddings=2048),
    "llama-2-7b": _sized(of.LLAMA_2, 32, 4096, 32, 32, 11008),
    "llama-2-13b": _sized(of.LLAMA_2, 40, 5120, 40, 40, 13824),
    "llama-2-70b": _sized(of.LLAMA_2, 80, 8192, 64, 8, 28672),
    "llama-3-8b": _sized(of.LLAMA_3, 32, 4096, 32, 8, 14336),
    "llama-3-70b": _sized(of.LLAMA_3, 80, 8192, 64, 8, 28672),
    "llama-3.1-8b": _sized(of.LLAMA_31, 32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _sized(of.LLAMA_31, 80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _sized(of.LLAMA_31, 126, 16384, 128, 8, 53248),
    "llama-3.2-1b": _sized(of.LLAMA_32, 16, 2048, 32, 8, 8192),
    "llama-3.2-3b": _sized(of.LLAMA_32, 28, 3072, 24, 8, 8192),
    "llama-3.3-70b": _sized(of.LLAMA_31, 80, 8192, 64, 8, 28672),
    "mistral-7b": _sized(of.MISTRAL, 32, 4096, 32, 8, 14336),
    "mistral-small-24b": _sized(of.MISTRAL, 40, 5120, 32, 8, 32768, head_dim=128, vocab_size=131072, rope_theta=1e8),
    "mistral-small-4-119b": _sized(of.MISTRAL_SMALL_4, 36, 4096, 32, 32, 12288),
    "ministral-3-tiny": _tiny(of.MINISTRAL_3, head_dim=32),
    "ministral-3-8b": _sized(of.MINISTRAL_3, 34, 4096, 32, 8, 14336),
    "qwen2.5-0.5b": _sized(of.QWEN_25_SMALL, 24, 896, 14, 2, 4864),
    "qwen2.5-1.5b": _sized(of.QWEN_25_SMALL, 28, 1536, 12, 2, 8960),
    "qwen2.5-3b": _sized(of.QWEN_25_SMALL, 36, 2048, 16, 2, 11008),
    "qwen2.5-7b": _sized(of.QWEN_25, 28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _sized(of.QWEN_25, 48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _sized(of.QWEN_25, 64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _sized(of.QWEN_25, 80, 8192, 64, 8, 29568),
    "qwen3-tiny": _tiny(of.QWEN_3, head_dim=32, max_position_embeddings=None),
    "qwen3-0.6b": _sized(of.QWEN_3_SMALL, 28, 1024, 16, 8, 3072),
    "qwen3-1.7b": _sized(of.QWEN_3_SMALL, 28, 2048, 16, 8, 6144),
    "qwen3-4b": _sized(of.QWEN_3_SMALL, 36, 2560, 32, 8, 9728),
    "qwen3-8b": _sized(of.QWEN_3, 36, 4096, 32, 8, 12288),
    "qwen3-14b": _sized(of.QWEN_3, 40, 5120, 40, 8, 17408),
    "qwen3-32b": _sized(of.QWEN_3, 64, 5120, 64, 8, 25600),
    "qwen3-moe-tiny": _tiny(
        of.QWEN_3_MOE, 64, head_dim=32, num_experts=8, num_experts_per_tok=2, max_position_embeddings=None
    ),
    "gpt-oss-tiny": _tiny(of.GPT_OSS, 64, head_dim=32, num_local_experts=8),
    "gpt-oss-20b": _sized(of.GPT_OSS, 24, 2880, 64, 8, 2880, num_local_experts=32),
    "gpt-oss-120b": _sized(of.GPT_OSS, 36, 2880, 64, 8, 2880),
    "gemma-2-tiny": _tiny(of.GEMMA_2, head_dim=32, query_pre_attn_scalar=24, sliding_window=128),
    "gemma-2-2b": _sized(of.GEMMA_2, 26, 2304, 8, 4, 9216),
    "gemma-2-9b": _sized(of.GEMMA_2, 42, 3584, 16, 8, 14336),
    "gemma-2-27b": _sized(of.GEMMA_2, 46, 4608, 32, 16, 36864, head_dim=128, query_pre_attn_scalar=144),
    "gemma-3-tiny": _tiny(
        of.GEMMA_3, head_dim=32, query_pre_attn_scalar=24, sliding_window=128, sliding_window_pattern=2
    ),
    "gemma-3-1b": _sized(of.GEMMA_3, 26, 1152, 4, 1, 6912),
    "gemma-3-4b": _sized(of.GEMMA_3_SEEING, 34, 2560, 8, 4, 10240),
    "gemma-3-12b": _sized(of.GEMMA_3_SEEING, 48, 3840, 16, 8, 15360),
    "gemma-3-27b": _sized(of.GEMMA_3_SEEING, 62, 5376, 32, 16, 21504, head_dim=128, query_pre_attn_scalar=168),
    "gemma-4-tiny": _tiny(
        of.GEMMA_4,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma-4-moe-tiny": _tiny(
        of.GEMMA_4_MOE,
        128,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts=8,
        top_k_experts=2,
        intermediate_size=160,
    ),
    "gemma-4-12b": _sized(
        of.GEMMA_4, 48, 3840, 16, 8, 15360, model_type="gemma4_unified_text", num_global_key_value_heads=1
    ),
    "gemma-4-26b-a4b": _sized(
        of.GEMMA_4_MOE, 30, 2816, 16, 8, 704, intermediate_size=2112, num_global_key_value_heads=2
    ),
    "gemma-4-31b": _sized(of.GEMMA_4, 60, 5376, 32, 16, 21504, num_global_key_value_heads=4),
    "qwen3.5-tiny": _tiny(
        of.QWEN_35,
        head_dim=32,
        full_attention_interval=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "qwen3.5-4b": _sized(of.QWEN_35, 32, 2560, 16, 4, 9216, tie_word_embeddings=True),
    "qwen3.5-9b": _sized(of.QWEN_35, 32, 4096, 16, 4, 12288),
    "qwen3.5-27b": _sized(of.QWEN_35, 64, 5120, 24, 4, 17408, linear_num_value_heads=48),
    "qwen3.5-35b-a3b": _sized(of.QWEN_35_MOE, 40, 2048, 16, 2, 512),
    "qwen3-next-80b-a3b": _sized(
        of.QWEN_35_MOE, 48, 2048, 16, 2, 512, vocab_size=151936, num_experts=512, num_experts_per_tok=10
    ),
    "glm-4.5-tiny": _tiny(
        of.GLM_45,
        head_dim=32,
        max_position_embeddings=None,
        use_qk_norm=True,
        n_routed_experts=8,
        moe_intermediate_size=64,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "glm-4.5-air": _sized(of.GLM_45, 46, 4096, 96, 8, 10944),
    "deepseek-tiny": _tiny(
        of.DEEPSEEK_V3,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=24,
        n_routed_experts=8,
        moe_intermediate_size=64,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
    "deepseek-v2-lite": _sized(of.DEEPSEEK_V2_LITE, 27, 2048, 16, 16, 10944),
    "deepseek-v3": _sized(of.DEEPSEEK_V3, 61, 7168, 128, 128, 18432),
    "moonlight-16b-a3b": _sized(of.MOONLIGHT, 27, 2048, 16, 16, 11264),
    "glm-4.7-flash": _sized(of.GLM_47_FLASH, 47, 2048, 20, 20, 10240),
    "olmo-2-7b": _sized(of.OLMO_2, 32, 4096, 32, 32, 11008),
    "olmo-2-13b": _sized(of.OLMO_2, 40, 5120, 40, 40, 13824),
    "olmo-2-32b": _sized(of.OLMO_2, 64, 5120, 40, 8, 27648),
    "olmo-3-tiny": _tiny(of.OLMO_3, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2),
    "olmo-3-7b": _sized(of.OLMO_3, 32, 4096, 32, 32, 11008),
    "olmo-3-32b": _sized(of.OLMO_3, 64, 5120, 40, 8, 27648),
    "qwen3-30b-a3b": _sized(of.QWEN_3_MOE, 48, 2048, 32, 4, 768),
    "qwen3-235b-a22b": _sized(of.QWEN_3_MOE, 94, 4096, 64, 4, 1536),
    "minimax-m2": _sized(of.MINIMAX_M2, 62, 3072, 48, 8, 1536),
    "mixtral-8x7b": _sized(of.MIXTRAL, 32, 4096, 32, 8, 14336),
    "mixtral-8x22b": _sized(of.MIXTRAL, 56, 6144, 48, 8, 16384, vocab_size=32768, max_position_embeddings=65536),
    "olmoe-1b-7b": _sized(of.OLMOE, 16, 2048, 16, 16, 1024),
    "phi-4": _sized(of.PHI_4, 40, 5120, 40, 10, 17920),
    "phi-4-mini": _sized(of.PHI_4_MINI, 32, 3072, 24, 8, 8192),
    "seed-oss-36b": _sized(
        {"model_type": "seed_oss", "vocab_size": 155136, "max_position_embeddings": 524288, "rope_theta": 1e7},
        *(64, 5120, 80, 8, 27648),
    ),
    "exaone-4.0-32b": _sized(of.EXAONE_4, 64, 5120, 40, 8, 27392),
    "smollm3-3b": _sized(of.SMOLLM_3, 36, 2048, 16, 4, 11008),
    "smollm2-1.7b": _sized(
        {**of.LLAMA_2, "tie_word_embeddings": True},
        *(24, 2048, 32, 32, 8192),
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=130000.0,
    ),
}


PRESETS: Mapping[str, ModelConfig] = LazyMapping(_MADE)
PUBLISHED = [name for name in PRESETS if not name.endswith("-tiny")]
"""Presets that messages list; tiny ones are for tests and examples."""


def listed() -> str:
    """Return the published presets; after the first of a family only the sizes: llama-2-7b/13b/70b."""
    found, last = "", ""
    for name in PUBLISHED:
        family, _, size = name.rpartition("-")
        found += f"/{size}" if family == last else f", {name}"
        last = family
    return found.removeprefix(", ")


def preset_name(name: str) -> str | None:
    """Return the name of the preset for `name` in upper or lower case; None if there is none."""
    return next((each for each in (name, name.lower()) if each in PRESETS), None)
