"""The factors on RoPE's cosines and sines that papers recommend for frequencies that are stretched."""

import math


def attention_factor_of(factor: float, weight: float = 1.0) -> float:
    """YaRN's, for frequencies stretched by `factor` (Peng et al., 2023, arXiv 2309.00071); DeepSeek gives the logarithm
    a weight."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def longrope_attention_factor_of(factor: float, original: int) -> float:
    """LongRoPE's, for `original` tokens before stretching (Ding et al., 2024, arXiv 2402.13753)."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
