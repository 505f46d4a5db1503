"""Rotary position embedding, half-split as in Llama and GPT-NeoX, with the usual scalings for long contexts.

Sources: RoFormer (Su et al., 2021); position interpolation (Chen et al., 2023); YaRN (Peng et al.,
2023, equations 17-23 with the temperature 0.1 ln(factor) + 1); LongRoPE (Ding et al., 2024); Llama 3.1's published
formula; for scaled queries transformers' code of Ministral 3.

Angles are computed in fp64: at position 10^6 an fp32 angle is already wrong by 0.06 radians.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memo.config.layer_words import numbers_of
from memo.config.model import ModelConfig
from memo.config.rope_factors import attention_factor_of, longrope_attention_factor_of


@dataclass(frozen=True)
class RopeTable:
    """cos and sin, [s, b, 1, d/2] in the model's dtype, for tokens of a microbatch and d dims of a head.

    Attributes:
        scaled: the table for queries, where they are scaled by their position; None: that of the keys.
        rest: factors on the channels that are not rotated, [s, b, 1, 1]; None: they stay as they are.
    """

    cos: Tensor
    sin: Tensor
    scaled: "RopeTable | None" = None
    rest: Tensor | None = None

    @property
    def of_queries(self) -> "RopeTable":
        return self.scaled or self

    def rows(self, tokens: slice) -> "RopeTable":
        scaled = None if self.scaled is None else self.scaled.rows(tokens)
        rest = None if self.rest is None else self.rest[tokens]
        return RopeTable(self.cos[tokens], self.sin[tokens], scaled, rest)


class Rope:
    """Makes the tables of one model.

    The frequencies are computed on the CPU, so that every device has the same bits. They stay on the device of the
    first positions, because a copy in every forward would make the host wait for all work queued on the device.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seq_length: int) -> None:
        self.config, self.dtype, self.seq_length = config, dtype, seq_length
        self._kept: tuple[Tensor, float] | None = None

    def table(self, positions: Tensor) -> RopeTable:
        """Return the table for positions [s, b] (int64)."""
        if self._kept is None or self._kept[0].device != positions.device:
            frequencies, scale = rope_frequencies(self.config, self.seq_length)
            self._kept = frequencies.to(positions.device), scale
        frequencies, scale = self._kept
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
        angles = angles.unsqueeze(2)
        table = RopeTable((angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype))
        if not self.config.rope_llama_4_scaling_beta:
            return table
        of_queries = _scales_of_queries(self.config, positions)[..., None, None]
        rest = of_queries.to(self.dtype) if self.config.rotary_dim < self.config.head_dim else None
        scales = scale * of_queries
        cos, sin = (angles.cos() * scales).to(self.dtype), (angles.sin() * scales).to(self.dtype)
        return replace(table, scaled=RopeTable(cos, sin, rest=rest))


@dataclass(frozen=True)
class RopeRows:
    """The table for positions [s, b]; its rows are computed on request."""

    rope: Rope
    positions: Tensor

    def rows(self, tokens: slice) -> RopeTable:
        return self.rope.table(self.positions[tokens])


def rope_table(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> RopeTable:
    """Return a single table, for positions [s, b] (int64) of sequences that end with the last of them."""
    return Rope(config, dtype, int(positions.max()) + 1).table(positions)


def rope_frequencies(config: ModelConfig, seq_length: int = 0) -> tuple[Tensor, float]:
    """Radians per position for each pair of the d rotated dims, [d/2] fp64, and the factor on cos and sin.

    LongRoPE alone depends on the length of sequences. All documents of a run are rotated alike, whatever they are
    packed with; transformers chooses anew for each batch, by its longest document.
    """
    dims = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64)
    frequencies = config.rotary_base ** (-dims / config.rotary_dim)
    factor = config.rope_scaling_factor
    if config.rope_scaling_type == "proportional":
        frequencies[config.turned_dim // 2 :] = 0
        return frequencies, 1.0
    if config.rope_scaling_type == "linear":
        return frequencies / factor, 1.0
    if config.rope_scaling_type == "llama3":
        return _llama3(config, frequencies), 1.0
    if config.rope_scaling_type == "yarn":
        return _yarn(config, frequencies), config.rope_attention_factor or attention_factor_of(factor)
    if config.rope_scaling_type == "longrope":
        original = config.rope_original_max_position_embeddings
        factors = numbers_of(config.rope_long_factor if seq_length > original else config.rope_short_factor)
        scale = config.rope_attention_factor or longrope_attention_factor_of(factor, original)
        return frequencies / torch.tensor(factors, dtype=torch.float64), scale
    return frequencies, 1.0


def _scales_of_queries(config: ModelConfig, positions: Tensor) -> Tensor:
    """Return factors on queries, [s, b] fp64, that grow with the logarithm of the position."""
    times = positions.div(config.rope_original_max_position_embeddings, rounding_mode="floor")
    return times.to(torch.float64).log1p_().mul_(config.rope_llama_4_scaling_beta).add_(1.0)


def _llama3(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """Keep short wavelengths, stretch long ones, blend between."""
    turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / config.rope_scaling_factor


def _yarn(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """Keep dims that turn often within the original length, and stretch dims that hardly turn."""

    def dim_of_turns(turns: float) -> float:
        length = config.rope_original_max_position_embeddings
        return config.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    first, last = dim_of_turns(config.rope_beta_fast), dim_of_turns(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, config.rotary_dim - 1)
    index = torch.arange(config.rotary_dim // 2, dtype=torch.float64)
    stretch = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return stretch * frequencies / config.rope_scaling_factor + (1.0 - stretch) * frequencies
