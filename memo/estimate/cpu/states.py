"""Weights, gradients and optimizer states of one rank, to the byte: memo.parallel.buckets without torch.

Every parameter begins at a multiple of 64 elements of its bucket, and a bucket is a multiple of 64 for each shard.
"""

from dataclasses import dataclass
from typing import NamedTuple

from memo.config import ModelConfig, RunConfig
from memo.config.derived import data_parallel_size, num_position_embeddings, resolved_dtype, vocab_rows_per_rank
from memo.units import DTYPE_BYTES

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
    """Elements: in all with padding, and those of parameters; `owner` is the first module in it."""

    size: int
    numel: int
    owner: int


@dataclass(frozen=True)
class States:
    """Bytes of one rank.

    Attributes:
        num_shards: dp x cp.
        bucket_sizes: elements, with the owner whose backward completes each.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    num_shards: int
    buckets: tuple[Bucket, ...]

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def rank_states(config: RunConfig, world_size: int, stage: int) -> States:
    narrow = DTYPE_BYTES[resolved_dtype(config, "cpu")]
    wide = max(4, narrow)
    shards = data_parallel_size(config, world_size) * config.parallel.cp
    buckets = _pack(stage_parameters(config, stage), config.parallel.ddp_bucket_size, shards)
    size = sum(bucket.size for bucket in buckets)
    numel = sum(bucket.numel for bucket in buckets)
    return States(
        weights=size * narrow,
        gradients=size * wide,
        masters=0 if narrow == wide else size // shards * wide,
        moments=2 * -(-numel // shards) * wide,
        num_shards=shards,
        buckets=tuple(buckets),
    )


def stage_parameters(config: RunConfig, stage: int) -> list[Parameter]:
    """In the order of the modules; a tied head on the embedding's own stage is no parameter of its own."""
    model, parallel = config.model, config.parallel
    table = vocab_rows_per_rank(model.vocabulary, parallel.tp) * model.hidden_size
    tied = not model.untie_embeddings_and_output_weights
    layer = _layer(model, parallel.tp)
    found: list[Parameter] = []
    owner = 0
    for chunk in range(parallel.vpp):
        if stage == 0 and chunk == 0:
            positions = num_position_embeddings(config) * model.hidden_size
            found += [Parameter(positions, "tp", owner)] if positions else []
            found.append(Parameter(table, "embedding" if tied else "", owner))
        for index in range(model.num_layers // (parallel.pp * parallel.vpp)):
            found += [Parameter(numel, kind, owner + 1 + index) for numel, kind in layer]
        owner += 1 + model.num_layers // (parallel.pp * parallel.vpp)
        if stage == parallel.pp - 1 and chunk == parallel.vpp - 1:
            if not tied or parallel.pp > 1:
                found.append(Parameter(table, "embedding" if tied else "", owner))
            found += [Parameter(numel, kind, owner) for numel, kind in _norm(model, model.hidden_size)]
        owner += 1
    return found


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


def _pack(parameters: list[Parameter], bucket_size: int, num_shards: int) -> list[Bucket]:
    """Gradients appear from the last module to the first, and so do the buckets."""
    closed: list[Bucket] = []
    opened: dict[str, list[Parameter]] = {}
    for parameter in reversed(parameters):
        own = opened.setdefault(parameter.kind, [])
        own.append(parameter)
        if _end(own) >= bucket_size:
            closed.append(_close(opened.pop(parameter.kind), num_shards))
    return closed + [_close(own, num_shards) for own in opened.values()]


def _close(parameters: list[Parameter], num_shards: int) -> Bucket:
    size = _round_up(_end(parameters), _ALIGNMENT * num_shards)
    return Bucket(size, sum(p.numel for p in parameters), min(p.owner for p in parameters))


def _end(parameters: list[Parameter]) -> int:
    return sum(_round_up(parameter.numel, _ALIGNMENT) for parameter in parameters)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
