"""Which numbers a model can have: for flags, for config.json of Hugging Face and for estimates alike.

The largest are far above any model that was built (the largest public ones have 126 layers and 18,432 channels), and
small enough that no sum or loop over them overflows or takes for ever.
"""

from functools import cache
from typing import Annotated, Any, get_type_hints

from memo.artifacts.fields import in_range
from memo.config.model import ModelConfig

_FACTOR = in_range(above=0, high=1e9)
RANGES = {
    "num_layers": in_range(1, 1 << 16),
    "hidden_size": in_range(1, 1 << 24),
    "num_attention_heads": in_range(1, 1 << 16),
    "num_query_groups": in_range(1, 1 << 16),
    "kv_channels": in_range(1, 1 << 16),
    "ffn_hidden_size": in_range(1, 1 << 26),
    "vocab_size": in_range(1, 1 << 28),
    "norm_epsilon": in_range(above=0, high=1),
    "max_position_embeddings": in_range(1, 1 << 40),
    "window_size": in_range(0, 1 << 40),
    "rotary_base": in_range(above=0, high=1e15),
    "rope_scaling_factor": _FACTOR,
    "rope_original_max_position_embeddings": in_range(1, 1 << 40),
    "rope_low_freq_factor": _FACTOR,
    "rope_high_freq_factor": _FACTOR,
    "rope_beta_fast": _FACTOR,
    "rope_beta_slow": _FACTOR,
    "init_method_std": in_range(0, 1000),
}
"""By the names of ModelConfig; each of its numbers is here."""


@cache
def number_of_model(name: str) -> Any:
    """The type of a field of ModelConfig with its range, for memo.artifacts.fields.checked."""
    return Annotated[get_type_hints(ModelConfig)[name], RANGES[name]]
