"""Facts on which a checkpoint and the run that loads it must agree: the function that the model is, and the samples it
reads.

Many fields change the function of a model and no shape: the rotary base, a norm's epsilon, how heads are split. So
every field of ModelConfig that this model reads counts, with its default resolved. A new field counts from the day it
is added; a checkpoint from before that day is taken to have its default.
"""

import dataclasses
from collections.abc import Collection, Mapping

from memo.config.flag import reading_marks
from memo.config.model import ModelConfig
from memo.config.run import RunConfig, canonical_name

Fact = str | int | float | bool
"""The value of one field in a saved state."""

DATA_FACTS = ("seq_length", "data_path", "packing", "long_conversations", "tokenizer")
"""Names of the facts that memo.data.corpus.data_identity states; a model that is only evaluated may read any data."""

MODEL_FACTS = tuple(entry.name for entry in dataclasses.fields(ModelConfig))


def model_identity(config: RunConfig) -> dict[str, Fact]:
    """{field of ModelConfig: fact} of a configuration whose vocabulary is known."""
    facts = model_facts(config.model)
    if config.model.position_embedding_type != "rope":
        facts["max_position_embeddings"] = config.model.position_rows(config.data.seq_length)
    return facts


def model_facts(model: ModelConfig) -> dict[str, Fact]:
    """{field: fact} of a model, without the rows of a learned table of positions."""
    experts, without, full = model.layers_with_experts, model.layers_without_rope, model.of_full_layers
    values = {
        **dataclasses.asdict(model),
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "full_num_query_groups": full.kv_heads if full.kv_heads != model.kv_heads else 0,
        "full_kv_channels": full.head_dim if full.head_dim != model.head_dim else 0,
        "ffn_hidden_size": model.ffn_size,
        "add_qkv_bias": model.qkv_bias,
        "layer_types": ",".join(model.types_of_layers) if model.layer_types else "",
        "moe_layer_freq": ",".join(map(str, map(int, experts))) if len(set(experts)) > 1 else "",
        "no_rope_freq": ",".join(map(str, map(int, without))) if any(without) else "",
        "lora_alpha": model.lora_alpha or float(model.lora_rank),
        "custom_layer": model.custom_layer.rpartition(":")[2],  # a file may have moved
    }
    unread = _unread(model)
    return {name: value for name, value in values.items() if name not in unread}


def accepted_changes(given: str | None) -> tuple[str, ...]:
    """The names in --load-accept-changes."""
    return tuple(canonical_name(name.strip()) for name in (given or "").split(",") if name.strip())


def differences(then: Mapping[str, Fact], now: Mapping[str, Fact], accepted: Collection[str] = ()) -> dict[str, str]:
    """{field: "... then, ... now"} of the facts that differ and are not accepted; empty if `then`, the saved facts, is
    empty."""
    defaults = {entry.name: entry.default for entry in dataclasses.fields(ModelConfig)}
    found = {}
    for name in now if then else ():
        was = then.get(name, defaults.get(name, now[name]))
        if was != now[name] and name not in accepted:
            found[name] = f"{_told(was)} then, {_told(now[name])} now"
    return found


def _told(fact: object) -> object:
    return "nothing" if fact == "" else fact


def _unread(model: ModelConfig) -> set[str]:
    """Fields that do not change the function of this model and its weights."""
    marks = reading_marks(ModelConfig).items()
    unread = {name for name, with_ in marks if not all(mark.accepts(getattr(model, mark.field)) for mark in with_)}
    if model.mlp_size == model.ffn_size:
        unread.add("moe_ffn_hidden_size")
    return {*unread, "max_position_embeddings", "init_method_std"}
