"""Checks that all ranks have the same flags; otherwise they would wait for each other or train different models."""

import dataclasses
import json
from typing import Any

from memo.config import RunConfig
from memo.config.blend import is_weight
from memo.errors import ConfigError
from memo.mesh import World

_MAY_DIFFER = ("data_path", "eval_data_path", "tokenizer")
"""Fields that may differ, because a node may have its own copy of the same files."""


def check_same_flags(config: RunConfig, world: World) -> None:
    """Compare this rank's flags with rank 0's through the run's store; flags of memory and hardware may differ.

    Raises ConfigError on every rank whose flags differ from rank 0's; it names the fields and both values.
    """
    if world.store is None:
        return
    mine = _fields(config)
    if world.rank == 0:
        world.store.set("flags", json.dumps(mine))
        return
    theirs = json.loads(world.store.get("flags"))
    differing = [
        f"--{name.replace('_', '-')} is {value} on rank {world.rank}, but {theirs.get(name)} on rank 0"
        for name, value in mine.items()
        if theirs.get(name) != value
    ]
    if differing:
        raise ConfigError(f"{'; '.join(differing)}: start all ranks of a run with the same flags")


def _fields(config: RunConfig) -> dict[str, Any]:
    sections = (config.model, config.parallel, config.training, config.data)
    fields = {name: value for section in sections for name, value in dataclasses.asdict(section).items()}
    weights = [word for word in config.data.data_path or () if is_weight(word)]
    as_read: dict[str, Any] = json.loads(json.dumps({**fields, "data_path (weights)": weights}))  # tuples become lists
    return {name: value for name, value in as_read.items() if name not in _MAY_DIFFER}
