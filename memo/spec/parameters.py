"""Exact parameter counts: of the whole model, and of one rank of each pipeline stage.

Known error: none for the model; a rank's flat buffers also round every parameter up to 64 elements.
"""

from dataclasses import dataclass
from functools import lru_cache

from memo.config import ModelConfig, RunConfig
from memo.spec.lora import check_patterns, trains_all
from memo.spec.shapes import ModelShape, shape_of
from memo.spec.stack import kinds_of, kinds_of_stage
from memo.spec.weights import Weight


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer: those that tp splits, and those that every tp rank holds in full (norms,
    late biases)."""

    split: int
    replicated: int

    @property
    def total(self) -> int:
        return self.split + self.replicated

    def of_rank(self, tp: int) -> int:
        return self.split // tp + self.replicated


@lru_cache(maxsize=256)
def layer_parameters(model: ModelConfig, *, trained: bool = False) -> LayerParameters:
    """Weights and biases of one layer, on the average of all layers; with `trained` only those that are trained.
    Cached, as a search asks for the same few models again and again."""
    layers = shape_of(model, "", 0).of_layers
    weights = [w for layer in layers for w in layer.layer_weights if not (trained and w.frozen)]
    split, replicated = (sum(w.numel for w in weights if (w.split == "whole") is whole) for whole in (False, True))
    return LayerParameters(split // len(layers), replicated // len(layers))


def count_parameters(config: RunConfig) -> int:
    """Parameters of the model as its checkpoint holds them, without padding rows of the vocabulary."""
    return shape_of_run(config).parameters


def stage_parameters(config: RunConfig, stage: int) -> int:
    """Trained parameters that one rank of a pipeline stage holds, vocabulary padding included."""
    shape, parallel = shape_of_run(config), config.parallel
    places = kinds_of_stage(config.model, parallel.pp, parallel.vpp, stage)
    each = [layer_parameters(kind, trained=True).of_rank(parallel.tp) for kind in kinds_of(config.model)]
    layers = sum(map(each.__getitem__, places))
    ends = end_weights(shape, parallel.pp, stage)
    return layers + sum(w.local_numel(parallel.tp) for end in ends for w in end if not w.frozen)


def end_weights(shape: ModelShape, pp: int, stage: int) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Weights of the embedding and of the head, empty where the stage has none.

    A tied table exists on the first and on the last stage, and once where these are the same stage.
    """
    is_first, is_last = stage == 0, stage == pp - 1
    head = tuple(w for w in shape.head_weights if not (w.tied and is_first))
    return (shape.embedding_weights if is_first else (), head if is_last else ())


def check_patterns_of(model: ModelConfig, seq_length: int) -> None:
    """Raises ConfigError for --freeze, --train-only or --lora-target-modules that do not fit the parameters of the
    model (memo.spec.lora)."""
    if not trains_all(model):
        shape = shape_of(model, "", model.position_rows(seq_length))
        layers = [(f"layers.{index}.", w) for index, of in enumerate(shape.of_layers) for w in of.layer_weights]
        ends = [("", weight) for weight in shape.embedding_weights], [("", weight) for weight in shape.head_weights]
        check_patterns(model, [*ends[0], *layers, *ends[1]])


def shape_of_run(config: RunConfig) -> ModelShape:
    return shape_of(config.model, "", config.model.position_rows(config.data.seq_length))
