"""Everything that can be refused is refused here, before a process group starts or memory is taken."""

import importlib.util
import os
from dataclasses import dataclass

import torch

from memo.checkpoint import has_checkpoint, latest_checkpoint
from memo.config import RunConfig
from memo.config.checks import check
from memo.config.derived import resolved_dtype, resolved_vocab_size, world_size_from_env
from memo.data import (
    CorpusFacts,
    IndexedDataset,
    MockDataset,
    PackedDataset,
    SampleDataset,
    Tokenizer,
    load_corpus_tokenizer,
    load_tokenizer,
)
from memo.errors import ConfigError, is_reporting_rank
from memo.estimate.admission import admit
from memo.estimate.host_memory import available_host_bytes
from memo.mesh import local_device
from memo.model.transformer import torch_dtype
from memo.train.device import Peak, device_peak, resolve_device_type, set_threads

DataSource = str | os.PathLike[str] | SampleDataset


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check."""

    config: RunConfig
    world_size: int
    device_type: str
    dtype: torch.dtype
    peak: Peak
    train_data: SampleDataset
    eval_data: SampleDataset | None


def prepare(
    config: RunConfig,
    train_data: DataSource | None = None,
    eval_data: DataSource | None = None,
    tokenizer: Tokenizer | None = None,
) -> Prepared:
    """Resolve every default, open the data, and check the run against this machine.

    Raises ConfigError, DataError, CheckpointError or ResourceError; each message says what to change.
    """
    world_size = world_size_from_env()
    if isinstance(train_data, str | os.PathLike):  # a path given in Python counts as if it were the flag
        config = config.override({"data_path": os.fspath(train_data)})
    device_type = resolve_device_type(config.hardware)
    config = config.override({"device": device_type, "params_dtype": resolved_dtype(config, device_type)})
    has_own_data = train_data is not None and not isinstance(train_data, str | os.PathLike)
    check(config, world_size, needs_data=not has_own_data)
    tokenizer = tokenizer or _tokenizer(config)
    vocab_size = resolved_vocab_size(config, tokenizer.vocab_size if tokenizer else None)
    if tokenizer is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            "leave it out, or give at least that many"
        )
    config = config.override({"vocab_size": vocab_size})
    _check_packages(config)
    _check_load(config)
    _check_writable(config)
    set_threads(config.hardware)
    dtype = torch_dtype(str(config.training.params_dtype))
    device = local_device(device_type)
    peak = device_peak(config.hardware, device, dtype)
    _admit(config, world_size, device, peak)
    return Prepared(
        config,
        world_size,
        device_type,
        dtype,
        peak,
        open_dataset(config, config.data.data_path if train_data is None else train_data, stream=0),
        _evaluation_data(config, eval_data),
    )


def open_dataset(config: RunConfig, source: DataSource | None, stream: int) -> SampleDataset:
    """An object as it is, the corpus at a path, or mock data for None.

    Mock data of another `stream` holds other samples. Raises ConfigError when data and model do not suit.
    """
    data, vocab_size = config.data, config.model.vocabulary
    if source is None:
        return MockDataset(vocab_size, data.seq_length, config.training.seed + stream)
    if not isinstance(source, str | os.PathLike):
        if source.seq_length != data.seq_length:
            raise ConfigError(
                f"--seq-length is {data.seq_length}, but the samples of the given data have "
                f"{source.seq_length} tokens: make them equal"
            )
        return source
    corpus = IndexedDataset(os.fspath(source))
    facts = f"{os.fspath(source)}.json"
    if os.path.exists(facts) and CorpusFacts.load(os.fspath(source)).vocab_size > vocab_size:
        raise ConfigError(
            f"--vocab-size is {vocab_size}, but {facts} says that the corpus uses "
            f"{CorpusFacts.load(os.fspath(source)).vocab_size} tokens: leave --vocab-size out"
        )
    return PackedDataset(corpus, data.seq_length, config.training.seed, packing=data.packing)


def _evaluation_data(config: RunConfig, given: DataSource | None) -> SampleDataset | None:
    source = config.data.eval_data_path if given is None else given
    if source is None and not (config.data.mock_data and config.training.eval_interval):
        return None
    return open_dataset(config, source, stream=1)


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    if config.data.data_path is not None and os.path.exists(f"{config.data.data_path}.json"):
        return load_corpus_tokenizer(config.data.data_path)
    if config.data.data_path is not None and config.model.vocab_size is None:
        raise ConfigError(
            f"--data-path {config.data.data_path} has no {config.data.data_path}.json that names its "
            "tokenizer, and --vocab-size is not given: give --tokenizer or --vocab-size"
        )
    return None


def _check_packages(config: RunConfig) -> None:
    for flag, value, package in (
        ("--tensorboard-dir", config.logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", config.logging.wandb_project, "wandb"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{flag} {value} needs the package {package}, which is not installed: "
                f"run pip install 'memo-train[{package}]', or leave the flag out"
            )


def _check_load(config: RunConfig) -> None:
    """--load must name a checkpoint, unless it is where this run itself will save its first."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is not None and not (load == save and not has_checkpoint(load)):
        latest_checkpoint(load)


def _check_writable(config: RunConfig) -> None:
    """What the run will write must have a place, or hours of training would end in an error."""
    for flag, value, is_directory in (
        ("--save", config.checkpoint.save, True),
        ("--log-jsonl", config.logging.log_jsonl, False),
    ):
        if value is None:
            continue
        path = nearest = os.path.abspath(value)
        while not os.path.exists(nearest):
            nearest = os.path.dirname(nearest)
        is_directory = is_directory or nearest != path
        if os.path.isdir(nearest) != is_directory or not os.access(nearest, os.W_OK):
            kind = "directory" if is_directory else "file"
            raise ConfigError(f"{flag} {value}: {nearest} is no {kind} that can be written: give another path")


def _admit(config: RunConfig, world_size: int, device: torch.device, peak: Peak) -> None:
    """One rank of each node asks for all of them: its answer must not differ from its neighbours'."""
    if not is_reporting_rank():
        return
    if device.type == "cuda":
        available_bytes, local_ranks = torch.cuda.mem_get_info(device)[0], 1
    else:
        available_bytes, local_ranks = available_host_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    admit(config, world_size, available_bytes, peak.flops, local_ranks)
