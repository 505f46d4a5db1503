"""Frozen dataclasses, one per concern. Nothing here imports torch: planning must work without it."""

from memo.config.data import DataConfig
from memo.config.memory import MemoryConfig
from memo.config.model import ModelConfig
from memo.config.model_name import preset
from memo.config.parallel import ParallelConfig
from memo.config.presets import PRESETS
from memo.config.run import CheckpointConfig, HardwareConfig, LoggingConfig, RunConfig
from memo.config.training import TrainingConfig

__all__ = [
    "PRESETS",
    "CheckpointConfig",
    "DataConfig",
    "HardwareConfig",
    "LoggingConfig",
    "MemoryConfig",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainingConfig",
    "preset",
]
