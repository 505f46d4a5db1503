"""Reads the configuration of a run that was saved with its checkpoints."""

from memo.checkpoint.directory import has_checkpoint, resolve_checkpoint
from memo.checkpoint.files import RUN_CONFIG
from memo.config import RunConfig
from memo.config.run import read_toml
from memo.errors import CheckpointError, ConfigError


def loaded_config(config: RunConfig) -> RunConfig | None:
    """The configuration of the run in --load; None without a checkpoint, or without a readable configuration there."""
    load = config.checkpoint.load
    if load is None or not has_checkpoint(load):
        return None
    try:
        return RunConfig().override(read_toml(resolve_checkpoint(load).parent / RUN_CONFIG))
    except (ConfigError, CheckpointError):  # the checkpoint was moved alone, or is of another version of memo
        return None
