"""Everything that can be refused is refused here, before a process group starts or memory is taken."""

import importlib.util
import os
import sys
from dataclasses import dataclass

import torch

from memo.attention.select import AttentionChoice
from memo.checkpoint.hugging_face import open_pretrained, pretrained_directory
from memo.config import RunConfig
from memo.config.checks import check
from memo.config.derived import (
    resolved_dtype,
    resolved_memory_planner,
    resolved_vocab_size,
)
from memo.config.launching import check_ranks, this_script
from memo.config.simulated import run_world_size, with_simulated_axes
from memo.data import (
    CorpusFacts,
    MockDataset,
    SampleDataset,
    Tokenizer,
    load_corpus_tokenizer,
    load_tokenizer,
    open_corpus,
)
from memo.data.epochs import with_epochs
from memo.data.find import check_corpora
from memo.errors import ConfigError, ResourceError, is_first_of_node
from memo.estimate.admission import admit
from memo.executor.disk_budget import disk_free_bytes
from memo.mesh import local_device
from memo.parallel.dtypes import torch_dtype
from memo.spec.custom_layer import check_split
from memo.train.attention import choose_attention
from memo.train.device import PeakFlops, device_peak, place_on_host, resolve_device_type
from memo.train.layer_profile import given_profile
from memo.train.memory_choice import choose_memory, is_undecided, overrule, room_of, sweeping_helps
from memo.train.outputs import check_files
from memo.train.planned_memory import prepare_allocator

DataSource = str | os.PathLike[str] | SampleDataset


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check.

    Attributes:
        config: as this rank has decided it; what auto means for layers is decided by the first rank of each node.
        placement, allocator: for people: where it runs on its host, and who serves its memory ("": parts tell).
        is_granularity_chosen: whether --offload-granularity was auto.
    """

    config: RunConfig
    world_size: int
    device_type: str
    dtype: torch.dtype
    peak: PeakFlops
    placement: str
    allocator: str
    is_granularity_chosen: bool
    attention: AttentionChoice
    train_data: SampleDataset
    eval_data: SampleDataset | None


def prepare(
    config: RunConfig,
    train_data: DataSource | None = None,
    eval_data: DataSource | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    must_fit: bool = True,
) -> Prepared:
    """Resolve every default, open the data, and check the run against this machine: all but its size if not `must_fit`.

    torch's allocator is prepared as well, before it has any of the device.

    Raises ConfigError, DataError, CheckpointError or ResourceError; each message says what to change.
    """
    config = with_simulated_axes(config)
    world_size = run_world_size(config.parallel)
    if isinstance(train_data, str | os.PathLike):  # a path given in Python counts as if it were the flag
        config = config.override({"data_path": os.fspath(train_data)})
    device_type, wanted_planner = resolve_device_type(config.hardware), config.memory.memory_planner
    resolved = {
        "device": device_type,
        "params_dtype": resolved_dtype(config, device_type),
        "memory_planner": resolved_memory_planner(config, device_type),
    }
    config = config.override(resolved)
    own_data = None if isinstance(train_data, str | os.PathLike) else train_data
    check_ranks(config, this_script(), sys.argv[1:], needs_data=own_data is None)
    if own_data is None:
        check_corpora(config)
    if config.training.num_epochs is not None:
        config = with_epochs(config, world_size, own_data)
        check(config, world_size, needs_data=own_data is None)
    tokenizer = tokenizer or _tokenizer(config)
    vocab_size = resolved_vocab_size(config, tokenizer.vocab_size if tokenizer else None)
    if tokenizer is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            "leave it out or give at least that many, or build the corpus with the tokenizer of a pretrained model"
        )
    config = config.override({"vocab_size": vocab_size})
    check_split(config.model, config.parallel.tp)
    _check_packages(config)
    check_files(config)
    if config.memory.offload_nvme_path is not None:
        disk_free_bytes(config.memory.offload_nvme_path)
    _check_pretrained(config)
    device = local_device(device_type)
    allocator = prepare_allocator(config.memory, device_type, wanted_planner)
    placement = place_on_host(config.hardware, device)
    dtype = torch_dtype(str(config.training.params_dtype))
    peak = device_peak(config.hardware, device, dtype)
    attention = choose_attention(config, device)
    config = config.override({"attention_backend": attention.name})
    is_chosen = is_undecided(config)
    config = choose_memory(config, world_size, device, must_fit=must_fit)
    if not is_undecided(config):
        given_profile(config, device)
    if must_fit and not is_undecided(config):
        _admit(config, world_size, device, peak)
    return Prepared(
        config,
        world_size,
        device_type,
        dtype,
        peak,
        placement,
        allocator,
        is_chosen,
        attention,
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
    corpus = open_corpus(source, data, config.training.seed)
    facts = f"{os.fspath(source)}.json"
    if os.path.exists(facts) and CorpusFacts.load(os.fspath(source)).vocab_size > vocab_size:
        raise ConfigError(
            f"--vocab-size is {vocab_size}, but {facts} says that the corpus uses "
            f"{CorpusFacts.load(os.fspath(source)).vocab_size} tokens: leave --vocab-size out, or build the corpus "
            "with the model's own tokenizer"
        )
    return corpus


def _evaluation_data(config: RunConfig, given: DataSource | None) -> SampleDataset | None:
    source = config.data.eval_data_path if given is None else given
    if source is None and not (config.data.mock_data and config.training.eval_interval):
        return None
    return open_dataset(config, source, stream=1)


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    data_path, pretrained = config.data.data_path, pretrained_directory(config)
    if data_path is None:
        return None
    theirs = load_tokenizer(pretrained) if pretrained and os.path.exists(f"{pretrained}/tokenizer.json") else None
    if os.path.exists(f"{data_path}.json"):
        corpus = load_corpus_tokenizer(data_path)
        if theirs is not None and theirs.vocab_size != corpus.vocab_size:  # its tokens would mean something else
            raise ConfigError(
                f"--data-path {data_path} was built with a tokenizer of {corpus.vocab_size} tokens, but "
                f"{pretrained}/tokenizer.json has {theirs.vocab_size}: build the corpus with --tokenizer {pretrained}, "
                "or name the corpus's own with --tokenizer if the model shall learn it"
            )
        return corpus
    if theirs is None and config.model.vocab_size is None:
        raise ConfigError(
            f"--data-path {data_path} has no {data_path}.json that names its "
            "tokenizer, and --vocab-size is not given: give --tokenizer or --vocab-size"
        )
    return theirs


def _check_packages(config: RunConfig) -> None:
    if config.hardware.kernels == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "--kernels triton needs the package triton, which is not installed: install it, or use --kernels torch"
        )
    for flag, value, package in (
        ("--tensorboard-dir", config.logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", config.logging.wandb_project, "wandb"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{flag} {value} needs the package {package}, which is not installed: "
                f"run pip install 'memo-train[{package}]', or leave the flag out"
            )


def _check_pretrained(config: RunConfig) -> None:
    """The weights that a run starts from must be whole, and of this model."""
    directory = pretrained_directory(config)
    if directory is not None:
        open_pretrained(directory, config)


def _admit(config: RunConfig, world_size: int, device: torch.device, peak: PeakFlops) -> None:
    """One rank of each node asks for all of them: its answer must not differ from its neighbours'."""
    if not is_first_of_node():
        return
    room = room_of(config, device)
    try:
        admit(
            config,
            world_size,
            room.available_bytes,
            peak.flops,
            room.local_ranks,
            host_bytes=room.host_bytes,
            host_ranks=room.host_ranks,
            total_bytes=room.total_bytes,
        )
    except ResourceError as error:
        overrule(config, ResourceError(f"{error}{sweeping_helps(config, world_size, device)}"))
