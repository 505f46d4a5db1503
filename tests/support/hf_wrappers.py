"""Tiny models of text within models of text and images, written by transformers."""

from pathlib import Path
from typing import Any

import torch
from hf_directories import CONFIGS

_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {"image_size": 16, "patch_size": 8}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32} | {
    "num_position_embeddings": 16,
    "patch_size": 4,
}
_QWEN3_VL = {**_QWEN, "deepstack_visual_indexes": [0]}
_PIXTRAL = {**_TOWER, **_PATCHES, "head_dim": 8, "model_type": "pixtral"}
_OF_IMAGES = {"rope_theta": 500.0, "rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_TEXTS = {
    **{name: fields for name, (_, fields) in CONFIGS.items()},
    "qwen3_vl_text": {**CONFIGS["qwen3"][1], "rope_parameters": _OF_IMAGES},
    "qwen3_vl_moe_text": {**CONFIGS["qwen3_moe"][1], "rope_parameters": _OF_IMAGES, "tie_word_embeddings": False},
}
WRAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", "qwen3_5_text", _QWEN),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe_text", _QWEN),
    "qwen3_vl": ("Qwen3VL", "qwen3_vl_text", _QWEN3_VL),
    "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3_vl_moe_text", _QWEN3_VL),
    "gemma3": ("Gemma3", "gemma3_text", {**_TOWER, **_PATCHES}),
    "gemma4": ("Gemma4", "gemma4_text", {**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 8}),
    "gemma4_unified": (
        *("Gemma4Unified", "gemma4_unified_text"),
        {"patch_size": 8, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 32},
    ),
    "mistral3": ("Mistral3", "mistral", _PIXTRAL),
    "mistral3-4": ("Mistral3", "mistral4", _PIXTRAL),
}
"""By model_type, with a number for another text: the prefix of its classes, the model_type of its text, and its part
for images."""


def wrapper_class(name: str) -> Any:
    import transformers

    return getattr(transformers, f"{WRAPPED[name][0]}ForConditionalGeneration")


def make_wrapper(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers with random weights everywhere, in evaluation mode."""
    import transformers

    prefix, text, tower = WRAPPED[name]
    fields = {**_TEXTS[text], "model_type": text, "max_position_embeddings": 4096}
    tied = bool(fields.get("tie_word_embeddings", text.startswith("gemma")))
    config = getattr(transformers, f"{prefix}Config")(text_config=fields, vision_config=tower, tie_word_embeddings=tied)
    model = wrapper_class(name)(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def write_wrapper(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """`save_pretrained` of make_wrapper(name) into directory/name; returns that."""
    make_wrapper(name, dtype).save_pretrained(directory / name)
    return directory / name
