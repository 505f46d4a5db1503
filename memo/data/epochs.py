"""Converts passes over a corpus (--num-epochs) to optimizer steps."""

import math

from memo.config import RunConfig
from memo.config.derived import global_batch_size
from memo.data.corpus import open_corpora, training_part
from memo.data.sample import SampleDataset
from memo.errors import ConfigError


def with_epochs(config: RunConfig, world_size: int, dataset: SampleDataset | None = None) -> RunConfig:
    """Return `config` with train_iters instead of num_epochs, rounded up to a whole step; unchanged without num_epochs.

    `dataset` is read instead of --data-path, if given. Raises ConfigError for one without samples_per_epoch, and the
    errors of `open_corpora`.
    """
    epochs, data = config.training.num_epochs, config.data
    if epochs is None:
        return config
    if dataset is None:
        words, part = data.data_path or (), training_part(data)
        dataset = open_corpora("--data-path", words, data, config.training.seed, part)
    samples = getattr(dataset, "samples_per_epoch", None)
    if samples is None:
        raise ConfigError(
            f"--num-epochs {epochs:g} needs the number of samples, but the given dataset has no samples_per_epoch: add "
            "it, or give --train-iters"
        )
    steps = math.ceil(epochs * samples / global_batch_size(config, world_size))
    return config.override({"train_iters": steps, "num_epochs": None})
