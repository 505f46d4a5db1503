"""Models by name: the paper's, published ones, and tiny ones of each family for tests.

Sources: MEMO table 2 (gpt-7b .. gpt-65b); for all other models the published config.json: for Qwen2.5 of the -Instruct
models, for Mistral 7B of v0.3, for Mistral Small of 2501. Each preset uses the keys of this file; the model's family
supplies all other fields (memo.config.hugging_face_families).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec

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


_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": None}
_LLAMA_2 = {**_LLAMA, "vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA_3 = {**_LLAMA, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
_STRETCHED = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
_LLAMA_31 = {**_LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": _STRETCHED}
_LLAMA_32 = {**_LLAMA_31, "rope_scaling": {**_STRETCHED, "factor": 32.0}, "tie_word_embeddings": True}
_MISTRAL = {**_LLAMA, "vocab_size": 32768, "max_position_embeddings": 32768, "rope_theta": 1e6}
_GROWING = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_MINISTRAL_3 = {
    "model_type": "ministral3",
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "rope_theta": 1e6,
    "rope_scaling": {**_GROWING, "factor": 16.0, "original_max_position_embeddings": 16384},
}
_MISTRAL_SMALL_4 = {
    **_MINISTRAL_3,
    "model_type": "mistral4",
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "rope_scaling": {**_GROWING, "factor": 128.0, "original_max_position_embeddings": 8192},
}
_MIXTRAL = {"model_type": "mixtral", "max_position_embeddings": 32768, "vocab_size": 32000}
_QWEN_25 = {"model_type": "qwen2", "rope_theta": 1e6, "vocab_size": 152064, "max_position_embeddings": 32768}
_QWEN_25_SMALL = {**_QWEN_25, "vocab_size": 151936, "tie_word_embeddings": True}
_QWEN_3 = {"model_type": "qwen3", "rope_theta": 1e6, "vocab_size": 151936, "max_position_embeddings": 40960}
_QWEN_3_SMALL = {**_QWEN_3, "tie_word_embeddings": True}
_QWEN_3_MOE = {**_QWEN_3, "model_type": "qwen3_moe", "num_experts": 128, "head_dim": 128, "norm_topk_prob": True}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
_GEMMA_2 = {"model_type": "gemma2"}
_GEMMA_3 = {"model_type": "gemma3_text", "sliding_window": 512, "max_position_embeddings": 32768, "vocab_size": 262144}
_GEMMA_3_SEEING = {  # the text model of models that read images
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_QWEN_35 = {"model_type": "qwen3_5_text", "vocab_size": 248320, "max_position_embeddings": 262144, "rope_theta": 1e7}
_QWEN_35_MOE = {
    **_QWEN_35,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "shared_expert_intermediate_size": 512,
}
_GLM_45 = {
    "model_type": "glm4_moe",
    "head_dim": 128,
    "attention_bias": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "vocab_size": 151552,
}
_BY_40 = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_scaling": {**_BY_40, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_DEEPSEEK_V2_LITE = {
    **_DEEPSEEK_V3,
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "rope_scaling": {**_BY_40, "mscale": 0.707, "mscale_all_dim": 0.707},
}
_GLM_47_FLASH = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rope_theta": 1e6,
}
_MOONLIGHT = {
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "max_position_embeddings": 8192,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
}
_OLMO_2 = {
    "model_type": "olmo2",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "vocab_size": 100352,
}
_OLMOE = {"model_type": "olmoe", "vocab_size": 50304, "max_position_embeddings": 4096}
_OLMO_3 = {
    "model_type": "olmo3",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    "vocab_size": 100278,
}
_MINIMAX_M2 = {"model_type": "minimax_m2", "vocab_size": 200064, "max_position_embeddings": 196608, "rotary_dim": 64}
_PHI_4 = {"model_type": "phi3", "vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000.0}
_PHI_4_MINI = {
    **_PHI_4,
    "vocab_size": 200064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [
            *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
            *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533),
            *(5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651),
            *(14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1),
            *(32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
        ],
    },
    "tie_word_embeddings": True,
}
_EXAONE_4 = {
    "model_type": "exaone4",
    "head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_scaling": {**_STRETCHED, "factor": 16.0},
}
_SMOLLM_3 = {"model_type": "smollm3", "vocab_size": 128256, "max_position_embeddings": 65536, "rope_theta": 5e6}

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
    "llama-tiny": _tiny(_LLAMA),
    "tinyllama-1.1b": _sized(_LLAMA_2, 22, 2048, 32, 4, 5632, max_position_embeddings=2048),
    "llama-2-7b": _sized(_LLAMA_2, 32, 4096, 32, 32, 11008),
    "llama-2-13b": _sized(_LLAMA_2, 40, 5120, 40, 40, 13824),
    "llama-2-70b": _sized(_LLAMA_2, 80, 8192, 64, 8, 28672),
    "llama-3-8b": _sized(_LLAMA_3, 32, 4096, 32, 8, 14336),
    "llama-3-70b": _sized(_LLAMA_3, 80, 8192, 64, 8, 28672),
    "llama-3.1-8b": _sized(_LLAMA_31, 32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _sized(_LLAMA_31, 80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _sized(_LLAMA_31, 126, 16384, 128, 8, 53248),
    "llama-3.2-1b": _sized(_LLAMA_32, 16, 2048, 32, 8, 8192),
    "llama-3.2-3b": _sized(_LLAMA_32, 28, 3072, 24, 8, 8192),
    "llama-3.3-70b": _sized(_LLAMA_31, 80, 8192, 64, 8, 28672),
    "mistral-7b": _sized(_MISTRAL, 32, 4096, 32, 8, 14336),
    "mistral-small-24b": _sized(_MISTRAL, 40, 5120, 32, 8, 32768, head_dim=128, vocab_size=131072, rope_theta=1e8),
    "mistral-small-4-119b": _sized(_MISTRAL_SMALL_4, 36, 4096, 32, 32, 12288),
    "ministral-3-tiny": _tiny(_MINISTRAL_3, head_dim=32),
    "ministral-3-8b": _sized(_MINISTRAL_3, 34, 4096, 32, 8, 14336),
    "qwen2.5-0.5b": _sized(_QWEN_25_SMALL, 24, 896, 14, 2, 4864),
    "qwen2.5-1.5b": _sized(_QWEN_25_SMALL, 28, 1536, 12, 2, 8960),
    "qwen2.5-3b": _sized(_QWEN_25_SMALL, 36, 2048, 16, 2, 11008),
    "qwen2.5-7b": _sized(_QWEN_25, 28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _sized(_QWEN_25, 48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _sized(_QWEN_25, 64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _sized(_QWEN_25, 80, 8192, 64, 8, 29568),
    "qwen3-tiny": _tiny(_QWEN_3, head_dim=32, max_position_embeddings=None),
    "qwen3-0.6b": _sized(_QWEN_3_SMALL, 28, 1024, 16, 8, 3072),
    "qwen3-1.7b": _sized(_QWEN_3_SMALL, 28, 2048, 16, 8, 6144),
    "qwen3-4b": _sized(_QWEN_3_SMALL, 36, 2560, 32, 8, 9728),
    "qwen3-8b": _sized(_QWEN_3, 36, 4096, 32, 8, 12288),
    "qwen3-14b": _sized(_QWEN_3, 40, 5120, 40, 8, 17408),
    "qwen3-32b": _sized(_QWEN_3, 64, 5120, 64, 8, 25600),
    "qwen3-moe-tiny": _tiny(
        _QWEN_3_MOE, 64, head_dim=32, num_experts=8, num_experts_per_tok=2, max_position_embeddings=None
    ),
    "gpt-oss-tiny": _tiny(_GPT_OSS, 64, head_dim=32, num_local_experts=8),
    "gpt-oss-20b": _sized(_GPT_OSS, 24, 2880, 64, 8, 2880, num_local_experts=32),
    "gpt-oss-120b": _sized(_GPT_OSS, 36, 2880, 64, 8, 2880),
    "gemma-2-tiny": _tiny(_GEMMA_2, head_dim=32, query_pre_attn_scalar=24, sliding_window=128),
    "gemma-2-2b": _sized(_GEMMA_2, 26, 2304, 8, 4, 9216),
    "gemma-2-9b": _sized(_GEMMA_2, 42, 3584, 16, 8, 14336),
    "gemma-2-27b": _sized(_GEMMA_2, 46, 4608, 32, 16, 36864, head_dim=128, query_pre_attn_scalar=144),
    "gemma-3-tiny": _tiny(
        _GEMMA_3, head_dim=32, query_pre_attn_scalar=24, sliding_window=128, sliding_window_pattern=2
    ),
    "gemma-3-1b": _sized(_GEMMA_3, 26, 1152, 4, 1, 6912),
    "gemma-3-4b": _sized(_GEMMA_3_SEEING, 34, 2560, 8, 4, 10240),
    "gemma-3-12b": _sized(_GEMMA_3_SEEING, 48, 3840, 16, 8, 15360),
    "gemma-3-27b": _sized(_GEMMA_3_SEEING, 62, 5376, 32, 16, 21504, head_dim=128, query_pre_attn_scalar=168),
    "qwen3.5-tiny": _tiny(
        _QWEN_35,
        head_dim=32,
        full_attention_interval=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "qwen3.5-4b": _sized(_QWEN_35, 32, 2560, 16, 4, 9216, tie_word_embeddings=True),
    "qwen3.5-9b": _sized(_QWEN_35, 32, 4096, 16, 4, 12288),
    "qwen3.5-27b": _sized(_QWEN_35, 64, 5120, 24, 4, 17408, linear_num_value_heads=48),
    "qwen3.5-35b-a3b": _sized(_QWEN_35_MOE, 40, 2048, 16, 2, 512),
    "qwen3-next-80b-a3b": _sized(
        _QWEN_35_MOE, 48, 2048, 16, 2, 512, vocab_size=151936, num_experts=512, num_experts_per_tok=10
    ),
    "glm-4.5-tiny": _tiny(
        _GLM_45,
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
    "glm-4.5-air": _sized(_GLM_45, 46, 4096, 96, 8, 10944),
    "deepseek-tiny": _tiny(
        _DEEPSEEK_V3,
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
    "deepseek-v2-lite": _sized(_DEEPSEEK_V2_LITE, 27, 2048, 16, 16, 10944),
    "deepseek-v3": _sized(_DEEPSEEK_V3, 61, 7168, 128, 128, 18432),
    "moonlight-16b-a3b": _sized(_MOONLIGHT, 27, 2048, 16, 16, 11264),
    "glm-4.7-flash": _sized(_GLM_47_FLASH, 47, 2048, 20, 20, 10240),
    "olmo-2-7b": _sized(_OLMO_2, 32, 4096, 32, 32, 11008),
    "olmo-2-13b": _sized(_OLMO_2, 40, 5120, 40, 40, 13824),
    "olmo-2-32b": _sized(_OLMO_2, 64, 5120, 40, 8, 27648),
    "olmo-3-tiny": _tiny(_OLMO_3, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2),
    "olmo-3-7b": _sized(_OLMO_3, 32, 4096, 32, 32, 11008),
    "olmo-3-32b": _sized(_OLMO_3, 64, 5120, 40, 8, 27648),
    "qwen3-30b-a3b": _sized(_QWEN_3_MOE, 48, 2048, 32, 4, 768),
    "qwen3-235b-a22b": _sized(_QWEN_3_MOE, 94, 4096, 64, 4, 1536),
    "minimax-m2": _sized(_MINIMAX_M2, 62, 3072, 48, 8, 1536),
    "mixtral-8x7b": _sized(_MIXTRAL, 32, 4096, 32, 8, 14336),
    "mixtral-8x22b": _sized(_MIXTRAL, 56, 6144, 48, 8, 16384, vocab_size=32768, max_position_embeddings=65536),
    "olmoe-1b-7b": _sized(_OLMOE, 16, 2048, 16, 16, 1024),
    "phi-4": _sized(_PHI_4, 40, 5120, 40, 10, 17920),
    "phi-4-mini": _sized(_PHI_4_MINI, 32, 3072, 24, 8, 8192),
    "seed-oss-36b": _sized(
        {"model_type": "seed_oss", "vocab_size": 155136, "max_position_embeddings": 524288, "rope_theta": 1e7},
        *(64, 5120, 80, 8, 27648),
    ),
    "exaone-4.0-32b": _sized(_EXAONE_4, 64, 5120, 40, 8, 27392),
    "smollm3-3b": _sized(_SMOLLM_3, 36, 2048, 16, 4, 11008),
    "smollm2-1.7b": _sized(
        {**_LLAMA_2, "tie_word_embeddings": True},
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
