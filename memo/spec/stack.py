"""A model is a stack of layers, which may be of several kinds: which kind stands where.

A kind is described by a model all of whose layers are of it. So a function that counts or times one layer is called for
each kind in turn, and the whole model is put together from the results by the places in the stack. Where activations
move, a slot has room for the widest kind of each tensor (memo.spec.skeleton).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from memo.config import ModelConfig, RunConfig
from memo.config.layer_words import FULL, LINEAR, SLIDING
from memo.spec.lora import of_one_layer
from memo.spec.schedule import Pipeline

_PerLayer = TypeVar("_PerLayer")


@lru_cache(maxsize=64)
def stack_of(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """The kind of each layer."""
    return tuple(of_one_layer(kind, layer) for layer, kind in enumerate(_by_operations(model)))


@lru_cache(maxsize=64)
def attending_layers(model: ModelConfig) -> frozenset[int]:
    """The layers that have keys and values; gated delta nets have none."""
    return frozenset(layer for layer, kind in enumerate(stack_of(model)) if not kind.is_linear)


@lru_cache(maxsize=256)
def recomputing_layers(model: ModelConfig, chunks: int, in_each: int) -> frozenset[int]:
    """The layers that recompute attention, `in_each` of every one of the model's pipeline chunks.

    They are the layers whose attention takes least: first gated delta nets, then sliding windows, each from the first
    layer on. The last layer of a chunk comes after all others, because its backward runs first: then no layer after it
    has freed the host records that its second forward takes.
    """
    stack, length = stack_of(model), model.num_layers // chunks

    def order(layer: int) -> tuple[bool, int, int]:
        kind = stack[layer]
        return layer % length == length - 1, 0 if kind.is_linear else 1 if kind.window_size else 2, layer

    firsts = range(0, model.num_layers, length)
    return frozenset(each for first in firsts for each in sorted(range(first, first + length), key=order)[:in_each])


def layers_with_attention_again(config: RunConfig) -> frozenset[int]:
    """The layers of a run that recompute attention (--recompute-attention-layers)."""
    in_each = config.memory.recompute_attention_layers
    return (
        recomputing_layers(config.model, config.parallel.pp * config.parallel.vpp, in_each) if in_each else frozenset()
    )


def _by_operations(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """The kind of each layer, regardless of which parameters are trained."""
    if (not model.layer_types or model.is_linear) and not model.moe_layer_freq and not model.no_rope_freq:
        return (model,) * model.num_layers
    full = replace(model.of_full_layers, moe_layer_freq="", sliding_rotary_base=0.0, no_rope_freq="")
    own = {name: getattr(model, name) for name in ("window_size", "num_query_groups", "kv_channels")}
    alike = replace(full, **own, full_keys_as_values=False)
    attention = {SLIDING: _rotating(alike, model.sliding_rotary_base), FULL: full}
    if LINEAR in model.types_of_layers:
        attention[LINEAR] = _linear(alike)
    types = [attention[name] for name in model.types_of_layers] if model.layer_types else [alike] * model.num_layers
    layers = zip(types, model.layers_with_experts, model.layers_without_rope, strict=True)
    return tuple(_with(kind, has_experts=experts, has_rope=not without) for kind, experts, without in layers)


@lru_cache(maxsize=64)
def _with(model: ModelConfig, *, has_experts: bool, has_rope: bool) -> ModelConfig:
    """`model` without experts, or without RoPE, if it has none here."""
    model = model if has_experts else replace(model, num_experts=0, moe_separate_norms=False)
    return model if has_rope else replace(model, position_embedding_type="none")


def _linear(model: ModelConfig) -> ModelConfig:
    """`model` with gated delta nets. The fields of attention's heads are then those of the nets, with value heads as
    query heads."""
    return replace(
        model,
        layer_types=LINEAR,
        window_size=0,
        num_attention_heads=model.linear_num_value_heads,
        num_query_groups=model.linear_num_key_heads,
        kv_channels=model.linear_key_head_dim,
        qk_layernorm=False,
        qk_layernorm_across_heads=False,
        v_layernorm=False,
        attn_logit_softcapping=0.0,
        attention_sinks=False,
        attention_output_gate=True,
    )


def _rotating(model: ModelConfig, base: float) -> ModelConfig:
    """`model` with this base of RoPE, no stretching and no scaling of queries; unchanged if the base is 0."""
    if not base:
        return model
    turned = 1.0 if model.rope_scaling_type == "proportional" else model.rotary_percent
    return replace(
        model, rotary_base=base, rope_scaling_type="none", rope_llama_4_scaling_beta=0.0, rotary_percent=turned
    )


def num_rotations(model: ModelConfig) -> int:
    """Kinds of layers whose RoPE angles differ; 0 without RoPE."""
    return len({kind.rotation for kind in kinds_of(model)} - {None})


@lru_cache(maxsize=64)
def kinds_of(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """The kinds that occur, in the order of their first layers."""
    return tuple(dict.fromkeys(stack_of(model)))


def runs_of_kinds(config: RunConfig) -> tuple[RunConfig, ...]:
    """For each of `kinds_of` the model, the run with all layers of that kind."""
    kinds = kinds_of(config.model)
    return (config,) if kinds == (config.model,) else tuple(replace(config, model=kind) for kind in kinds)


@lru_cache(maxsize=1024)
def kinds_of_stage(model: ModelConfig, pp: int, vpp: int, stage: int) -> tuple[int, ...]:
    """For each layer of a pipeline stage, chunk by chunk, the index of its kind in `kinds_of` the model."""
    kinds = kinds_of(model)
    return of_stage([kinds.index(kind) for kind in stack_of(model)], pp, vpp, stage)


def of_stage(layers: Sequence[_PerLayer], pp: int, vpp: int, stage: int) -> tuple[_PerLayer, ...]:
    """The entries of `layers`, one for each layer of a model, that belong to a pipeline stage, chunk by chunk."""
    chunks = (Pipeline(pp, vpp, microbatches=1).layers(stage, chunk, len(layers)) for chunk in range(vpp))
    return tuple(layers[index] for chunk in chunks for index in chunk)
