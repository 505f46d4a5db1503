"""A model is a stack of layers, which may be of several kinds: which kind stands where.

A kind is told by a model all of whose layers are of it. So whoever counts or times one layer is asked about each kind
in turn, and what a whole model takes is put together from the answers by the places in the stack. All kinds have the
same weights, and keep tensors of the same sizes between forward and backward.
"""

from dataclasses import replace
from functools import lru_cache

from memo.config import ModelConfig, RunConfig
from memo.config.model import FULL, SLIDING


@lru_cache(maxsize=64)
def stack_of(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """The kind of each layer."""
    if not model.layer_types:
        return (model,) * model.num_layers
    sliding = replace(model, layer_types="")
    kinds = {SLIDING: sliding, FULL: replace(sliding, window_size=0)}
    return tuple(kinds[name] for name in model.types_of_layers)


@lru_cache(maxsize=64)
def kinds_of(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """The kinds that occur, in the order of their first layers."""
    return tuple(dict.fromkeys(stack_of(model)))


def runs_of_kinds(config: RunConfig) -> tuple[RunConfig, ...]:
    """The same run for each of `kinds_of` its model, all of whose layers are of that kind."""
    if not config.model.layer_types:
        return (config,)
    return tuple(replace(config, model=kind) for kind in kinds_of(config.model))
