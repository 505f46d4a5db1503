"""Flat buckets of one rank without torch: what memo.parallel.buckets lays out, counted.

Every parameter begins at a multiple of 64 elements of its bucket, and a bucket is a multiple of 64 for each shard. A
bucket closes once it is full and at the end of each module, so that the states of one layer are a unit that can move.

    unit     embedding | layer | layer | ... | head and final norm
    bucket   | . | . |  | . |.| | . |.|       | . |.|                  (a kind of replication each, of at most one unit)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from memo.config import ModelConfig, RunConfig
from memo.config.derived import data_parallel_size, num_position_embeddings, vocab_rows_per_rank

_ALIGNMENT = 64


class Parameter(NamedTuple):
    """Attributes:
    kind: which ranks hold it too and sum its gradient: "", "tp" or "embedding".
    owner: position in the stage's modules, first to last: embedding, layers, head of chunk 0, then of chunk 1.
    """

    numel: int
    kind: str
    owner: int


@dataclass(frozen=True)
class Bucket:
    """Elements: in all with padding, and those of parameters; `owner` is the module that it belongs to."""

    size: int
    numel: int
    owner: int


class Unit(NamedTuple):
    """Elements of one module's buckets: all with padding, parameters alone, and the largest bucket with padding."""

    size: int
    numel: int
    largest: int


@dataclass(frozen=True)
class RankUnits:
    """What one rank of a stage holds: `layers` alike, and the ends of the model that the stage has."""

    layer: Unit
    layers: int
    ends: tuple[Unit, ...]


def rank_units(config: RunConfig, world_size: int, stage: int) -> RankUnits:
    """Units of a rank of pipeline stage `stage`, to the element."""
    parallel = config.parallel
    shards = data_parallel_size(config, world_size) * parallel.cp
    layer = layer_unit(config.model, parallel.tp, parallel.ddp_bucket_size, shards)
    chunks = [embedding_parameters(config, stage, 0), head_parameters(config, stage, 0)]
    ends = tuple(_unit(tuple(end), parallel.ddp_bucket_size, shards) for end in chunks if end)
    return RankUnits(layer, config.model.num_layers // parallel.pp, ends)


@lru_cache(maxsize=256)
def layer_unit(model: ModelConfig, tp: int, bucket_size: int, num_shards: int) -> Unit:
    """One transformer layer; a search asks for the same few again and again."""
    return _unit(tuple(Parameter(numel, kind, 0) for numel, kind in _layer(model, tp)), bucket_size, num_shards)


def parameters_of_stage(config: RunConfig, stage: int) -> list[Parameter]:
    """In the order of the modules; a tied head on the embedding's own stage is no parameter of its own."""
    parallel = config.parallel
    layer = _layer(config.model, parallel.tp)
    per_chunk = config.model.num_layers // (parallel.pp * parallel.vpp)
    found: list[Parameter] = []
    owner = 0
    for chunk in range(parallel.vpp):
        found += embedding_parameters(config, stage, owner) if chunk == 0 else []
        for index in range(per_chunk):
            found += [Parameter(numel, kind, owner + 1 + index) for numel, kind in layer]
        owner += 1 + per_chunk
        found += head_parameters(config, stage, owner) if chunk == parallel.vpp - 1 else []
        owner += 1
    return found


def embedding_parameters(config: RunConfig, stage: int, owner: int) -> list[Parameter]:
    """Of the first stage; none of others."""
    if stage != 0:
        return []
    positions = num_position_embeddings(config) * config.model.hidden_size
    kind = "" if config.model.untie_embeddings_and_output_weights else "embedding"
    found = [Parameter(positions, "tp", owner)] if positions else []
    return [*found, Parameter(_table(config), kind, owner)]


def head_parameters(config: RunConfig, stage: int, owner: int) -> list[Parameter]:
    """Head and final norm of the last stage; none of others."""
    model, pp = config.model, config.parallel.pp
    if stage != pp - 1:
        return []
    tied = not model.untie_embeddings_and_output_weights
    found = [Parameter(_table(config), "embedding" if tied else "", owner)] if not tied or pp > 1 else []
    return found + [Parameter(numel, kind, owner) for numel, kind in _norm(model, model.hidden_size)]


def pack(parameters: Sequence[Parameter], bucket_size: int, num_shards: int) -> list[Bucket]:
    """Gradients appear from the last module to the first, and so do the buckets."""
    closed: list[Bucket] = []
    opened: dict[str, list[Parameter]] = {}
    owner = parameters[-1].owner if parameters else 0
    for parameter in reversed(parameters):
        if parameter.owner != owner:
            closed += [_close(own, num_shards) for own in opened.values()]
            opened, owner = {}, parameter.owner
        own = opened.setdefault(parameter.kind, [])
        own.append(parameter)
        if _end(own) >= bucket_size:
            closed.append(_close(opened.pop(parameter.kind), num_shards))
    return closed + [_close(own, num_shards) for own in opened.values()]


def _unit(parameters: tuple[Parameter, ...], bucket_size: int, num_shards: int) -> Unit:
    buckets = pack(parameters, bucket_size, num_shards)
    sizes = [bucket.size for bucket in buckets]
    return Unit(sum(sizes), sum(bucket.numel for bucket in buckets), max(sizes))


def _table(config: RunConfig) -> int:
    return vocab_rows_per_rank(config.model.vocabulary, config.parallel.tp) * config.model.hidden_size


def _layer(model: ModelConfig, tp: int) -> list[tuple[int, str]]:
    hidden, ffn = model.hidden_size, model.ffn_size
    q, kv = model.num_attention_heads * model.head_dim, model.kv_heads * model.head_dim
    fc1 = ffn * (2 if model.gated else 1)
    norm, late_bias = _norm(model, hidden), [(hidden, "tp")] if model.add_bias_linear else []
    heads = 2 * _norm(model, model.head_dim) if model.qk_layernorm else []
    return [
        *norm,
        (hidden * (q + 2 * kv) // tp, ""),
        *([((q + 2 * kv) // tp, "")] if model.qkv_bias else []),
        *heads,
        (hidden * q // tp, ""),
        *late_bias,
        *norm,
        (hidden * fc1 // tp, ""),
        *([(fc1 // tp, "")] if model.add_bias_linear else []),
        (hidden * ffn // tp, ""),
        *late_bias,
    ]


def _norm(model: ModelConfig, size: int) -> list[tuple[int, str]]:
    return [(size, "tp")] * (2 if model.normalization == "LayerNorm" else 1)


def _close(parameters: list[Parameter], num_shards: int) -> Bucket:
    size = _round_up(_end(parameters), _ALIGNMENT * num_shards)
    return Bucket(size, sum(p.numel for p in parameters), parameters[0].owner)


def _end(parameters: list[Parameter]) -> int:
    return sum(_round_up(parameter.numel, _ALIGNMENT) for parameter in parameters)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
