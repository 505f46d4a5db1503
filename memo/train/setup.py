"""Everything that can be refused is refused here, before a process group starts or memory is taken."""

import importlib.util
import os
import sys
from dataclasses import dataclass, replace

import torch

from memo.attention.select import AttentionChoice
from memo.checkpoint.hugging_face import open_pretrained, pretrained_directory
from memo.checkpoint.store import from_rank_zero
from memo.config import RunConfig
from memo.config.checks import check
from memo.config.derived import (
    local_world_size_from_env,
    resolved_dtype,
    resolved_memory_planner,
    resolved_vocab_size,
)
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
from memo.errors import ConfigError, ResourceError, is_first_of_node
from memo.estimate.admission import admit
from memo.estimate.host_memory import available_host_bytes, node_budget_bytes, total_host_bytes
from memo.estimate.machines import nearest_hardware
from memo.estimate.own_memory import RUNTIME_BYTES
from memo.executor.disk_budget import disk_free_bytes
from memo.mesh import Mesh, local_device
from memo.parallel.dtypes import torch_dtype
from memo.search.states import resolve_states
from memo.train.attention import choose_attention
from memo.train.device import PeakFlops, device_peak, gpu_name, place_on_host, resolve_device_type
from memo.train.layer_profile import given_profile
from memo.train.outputs import check_files
from memo.train.planned_memory import prepare_allocator
from memo.units import GIB

DataSource = str | os.PathLike[str] | SampleDataset


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check.

    Attributes:
        placement, allocator: for people: where it runs on its host, and who serves its memory ("": parts tell).
    """

    config: RunConfig
    world_size: int
    device_type: str
    dtype: torch.dtype
    peak: PeakFlops
    placement: str
    allocator: str
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
    has_own_data = train_data is not None and not isinstance(train_data, str | os.PathLike)
    check(config, world_size, needs_data=not has_own_data)
    tokenizer = tokenizer or _tokenizer(config)
    vocab_size = resolved_vocab_size(config, tokenizer.vocab_size if tokenizer else None)
    if tokenizer is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            "leave it out or give at least that many, or build the corpus with the tokenizer of a pretrained model"
        )
    config = config.override({"vocab_size": vocab_size})
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
    given_profile(config, device)
    config = _place_states(config, world_size, device)
    if must_fit:
        _admit(config, world_size, device, peak)
    return Prepared(
        config,
        world_size,
        device_type,
        dtype,
        peak,
        placement,
        allocator,
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


def _place_states(config: RunConfig, world_size: int, device: torch.device) -> RunConfig:
    """Decide --offload-states auto from what is free here; ranks agree on the first one's answer once they can talk."""
    if config.memory.offload_states != "auto":
        return config
    machine = "cpu"
    device_bytes, total_bytes = available_host_bytes() // local_world_size_from_env(), 0
    if device.type == "cuda":
        machine = gpu_name(device)
        device_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if config.memory.device_memory_gib is not None:
        device_bytes = min(device_bytes, int(config.memory.device_memory_gib * GIB))
    hardware = nearest_hardware(machine, total_bytes / GIB)
    local_ranks = local_world_size_from_env()
    host_bytes = node_budget_bytes(available_host_bytes(), config.memory.offload_host_memory_gib)
    return resolve_states(config, world_size, device_bytes, host_bytes, hardware, local_ranks=local_ranks)


def agreed(config: RunConfig, mesh: Mesh) -> RunConfig:
    """Where states are, as the first rank has decided it: each rank has asked what was free around it. Collective."""
    memory = from_rank_zero(lambda: config.memory, mesh.rank, None if mesh.is_alone else mesh.world)
    return replace(config, memory=memory)


def _device_room(device: torch.device) -> tuple[int, int]:
    """Bytes of a CUDA device that a run may take, its context with them, and all bytes.

    To ask makes this process's context, which is missing in what is free, and the account of a run counts it. So what
    is taken already is this process's own up to what is assumed for a context, and other processes' beyond that.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return min(free_bytes + RUNTIME_BYTES["cuda"], total_bytes), total_bytes


def _admit(config: RunConfig, world_size: int, device: torch.device, peak: PeakFlops) -> None:
    """One rank of each node asks for all of them: its answer must not differ from its neighbours'."""
    if not is_first_of_node():
        return
    node_ranks = local_world_size_from_env()
    if device.type == "cuda":
        (available_bytes, total_bytes), local_ranks = _device_room(device), 1
    else:
        available_bytes, total_bytes, local_ranks = available_host_bytes(), total_host_bytes(), node_ranks
    host_bytes = None
    if config.memory.offloads_states:
        host_bytes = node_budget_bytes(available_host_bytes(), config.memory.offload_host_memory_gib)
    try:
        admit(
            config,
            world_size,
            available_bytes,
            peak.flops,
            local_ranks,
            host_bytes=host_bytes,
            host_ranks=node_ranks,
            total_bytes=total_bytes,
        )
    except ResourceError as error:
        if config.training.admission:
            raise ResourceError(f"{error}; this is an estimate: --no-admission starts the run all the same") from None
        print(f"warning: --no-admission overrules an estimate: {error}", file=sys.stderr, flush=True)
