"""Families of models of Hugging Face that memo counts and plans for, and does not train."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memo.config.hugging_face_family import Biases, ConfigKeys, Family
from memo.config.hugging_face_shared import GPT2, LLAMA_NAMES, SIZES, TIED
from memo.config.model import ModelConfig


def _opt(keys: ConfigKeys, model: ModelConfig) -> Mapping[str, Any]:
    """Embeddings narrower than the hidden size are projected before and after the layers."""
    has_width = keys.get("word_embed_proj_dim") is not None
    width = keys.number("hidden_size", "word_embed_proj_dim") if has_width else model.hidden_size
    return {
        "norm_vectors": 2 if keys.switch("layer_norm_elementwise_affine") else 0,
        "embedding_width": width,
        "final_norm": keys.switch("do_layer_norm_before") and not keys.switch("_remove_final_layer_norm"),
        "extra": 0 if width == model.hidden_size else width * model.hidden_size,  # the projection after the layers
    }


COUNTED: dict[str, Family] = {
    "gemma": Family(names=LLAMA_NAMES, defaults={**TIED, "head_dim": 256}),
    "gpt_bigcode": replace(GPT2, one_kv_head="multi_query"),
    "opt": replace(
        GPT2,
        names={**SIZES, "ffn_hidden_size": "ffn_dim"},
        defaults={**TIED, "max_position_embeddings": 2048},
        biases=Biases("enable_bias", "enable_bias", "enable_bias"),
        spare_positions=2,
        beyond=_opt,
    ),
    "gpt_neox": replace(
        GPT2,
        names={**SIZES, "norm_epsilon": "layer_norm_eps"},
        defaults={"attention_bias": True},
        fixed={},
        biases=Biases("attention_bias", "attention_bias", True),
    ),
    # Attention scores have a slope (ALiBi), so there are neither rotations nor a table of positions.
    "bloom": replace(
        GPT2,
        names={
            "num_layers": "n_layer",
            "hidden_size": "hidden_size",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
            "norm_epsilon": "layer_norm_epsilon",
        },
        aliases={"n_layer": "num_hidden_layers", "hidden_size": "n_embed", "n_head": "num_attention_heads"},
        beyond=lambda keys, model: {"embedding_norm": True},
    ),
    # Attention and MLP have the same normed input; the head has a bias.
    "codegen": replace(
        GPT2,
        defaults={"n_positions": 2048},
        fixed={},
        biases=Biases(False, False, True),
        beyond=lambda keys, model: {"norms": ("attention_norm",), "head_bias": True},
    ),
    "gpt_neo": replace(
        GPT2,
        names={
            **SIZES,
            "num_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "norm_epsilon": "layer_norm_epsilon",
        },
        defaults={**TIED, "intermediate_size": None, "max_position_embeddings": 2048},
        biases=Biases(False, True, True),
    ),
    "biogpt": replace(
        GPT2,
        names={**SIZES, "norm_epsilon": "layer_norm_eps"},
        defaults={**TIED, "max_position_embeddings": 1024, "layer_norm_eps": 1e-12},
        spare_positions=2,
    ),
}
"""By model_type, in the order in which messages list them."""
