"""The configuration of a run, which lies beside its checkpoints."""

from memo.checkpoint.directory import has_checkpoint, resolve_checkpoint
from memo.checkpoint.files import RUN_CONFIG
from memo.config import RunConfig
from memo.config.run import read_toml
from memo.errors import CheckpointError, ConfigError


def loaded_config(config: RunConfig) -> RunConfig | None:
    """That of the run that --load goes on with; None if there is none, or its configuration is not there."""
    load = config.checkpoint.load
    if load is None or not has_checkpoint(load):
        return None
    try:
        return RunConfig().override(read_toml(resolve_checkpoint(load).parent / RUN_CONFIG))
    except (ConfigError, CheckpointError):  # of a checkpoint that was moved alone, or of another version of memo
        return None
