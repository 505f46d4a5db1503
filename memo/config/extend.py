"""A model's rotary positions stretched for sequences longer than it was made for: the start of an extension.

    rope-base   theta' = theta * s^(d / (t - 2)),  s = new length / old length,  d = rotated dims of a head, t = d, or
                those that turn where RoPE is proportional
    yarn        wavelengths that turn often within the original length stay, those that hardly turn become s times as
                long, with a blend between; s = new length / original length

Sources: "NTK-aware" interpolation in the form of YaRN's authors (Peng et al., 2023, arXiv 2309.00071, section 3.1):
the slowest pair of dims, whose angle is theta^-((d - 2) / d) a token, turns over the new length exactly as far as it
did over the old one, and the fastest as fast as before. YaRN itself: sections 3.2 to 3.4, in memo/model/rope.py.
"""

import math
from dataclasses import replace
from typing import Literal

from memo.config.model import ModelConfig
from memo.config.require import require

ExtensionMethod = Literal["rope-base", "yarn"]


def extend_context(model: ModelConfig, seq_length: int, method: ExtensionMethod) -> ModelConfig:
    """`model` for `seq_length` tokens, its weights' shapes unchanged; it must be trained on such sequences.

    rope-base multiplies the base and keeps a scaling that the model already has. yarn replaces a scaling that the
    model has, and is measured from the length before any scaling.

    Raises ConfigError for learned positions, and unless the model says what shorter length it was made for.
    """
    made_for = model.max_position_embeddings
    require(
        model.position_embedding_type == "rope",
        f"--position-embedding-type is {model.position_embedding_type}, and a table of positions cannot be stretched: "
        "give a model with rotary positions",
    )
    require(made_for, "--max-position-embeddings is not given: state the length that the model was made for")
    assert made_for is not None
    require(
        seq_length > made_for,
        f"--seq-length {seq_length} is not above --max-position-embeddings {made_for}, which the model is made for "
        f"already: give more, such as {4 * made_for}",
    )
    if method == "rope-base":
        full = model.of_full_layers
        dims, turned = full.rotary_dim, full.turned_dim
        require(
            turned > 2, f"RoPE turns {turned} dims of a head, one pair, whose angle no base changes: use --method yarn"
        )
        base = model.rotary_base * (seq_length / made_for) ** (dims / (turned - 2))
        return replace(model, rotary_base=base, max_position_embeddings=seq_length)
    require(
        model.rope_scaling_type != "proportional",
        "--method yarn has no form for --rope-scaling-type proportional: use --method rope-base",
    )
    original = _original_length(model, made_for)
    return replace(
        model,
        max_position_embeddings=seq_length,
        rope_scaling_type="yarn",
        rope_scaling_factor=seq_length / original,
        rope_original_max_position_embeddings=original,
        rope_short_factor=ModelConfig.rope_short_factor,
        rope_long_factor=ModelConfig.rope_long_factor,
        rope_low_freq_factor=ModelConfig.rope_low_freq_factor,
        rope_high_freq_factor=ModelConfig.rope_high_freq_factor,
    )


def _original_length(model: ModelConfig, made_for: int) -> int:
    """The length before any stretching."""
    if model.rope_scaling_type in ("llama3", "yarn", "longrope"):
        return model.rope_original_max_position_embeddings
    if model.rope_scaling_type == "linear":
        return math.floor(made_for / model.rope_scaling_factor)
    return made_for
