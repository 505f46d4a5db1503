"""Prepares a run: makes every check that can refuse it, before a process group starts or memory is taken."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from memo.attention.select import AttentionChoice
from memo.checkpoint.hugging_face.load import given_adapters, open_pretrained, pretrained_directory
from memo.config import RunConfig
from memo.config.check_model import unscaled_length
from memo.config.checks import check
from memo.config.derived import (
    resolved_dtype,
    resolved_lr,
    resolved_lr_warmup_iters,
    resolved_memory_planner,
    resolved_vocab_size,
)
from memo.config.hugging_face import INDEX_FILE, SINGLE_FILE, download_hint, has_weights
from memo.config.launching import check_ranks, this_script
from memo.config.require import require
from memo.config.run import HardwareConfig, LoggingConfig
from memo.config.simulated_world import run_world_size, with_simulated_axes
from memo.data import PreferencePairs, SampleDataset, Tokenizer
from memo.data.corpus import with_epochs
from memo.data.find import check_corpora
from memo.errors import ConfigError, ResourceError, is_first_of_node, is_reporting_rank, tell
from memo.estimate.admission import admit
from memo.executor.disk_budget import disk_free_bytes
from memo.mesh import local_device
from memo.parallel.dtypes import torch_dtype
from memo.spec.custom_layer import check_split, layer_name
from memo.spec.flops import microbatch_flops
from memo.spec.parameters import check_patterns_of
from memo.train.attention import choose_attention, choose_delta_nets
from memo.train.data_sources import (
    DataSource,
    EvalSource,
    are_texts,
    corpus_words,
    evaluation_data,
    open_dataset,
    own_dataset,
    tokenizer_of,
)
from memo.train.determinism import make_deterministic
from memo.train.device import PeakFlops, device_peak, place_on_host, resolve_device_type
from memo.train.layer_profile import given_profile
from memo.train.memory_choice import choose_memory, is_undecided, overrule, room_of, sweeping_helps
from memo.train.outputs import check_files
from memo.train.planned_memory import prepare_allocator
from memo.train.preference import stored_reference


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check."""

    config: RunConfig
    """Resolved on this rank; only the first rank of each node resolves auto for layers."""
    world_size: int
    device_type: str
    dtype: torch.dtype
    peak: PeakFlops
    placement: str
    """CPU threads and NUMA node of this rank, for people."""
    is_granularity_chosen: bool
    """Whether --offload-granularity was auto."""
    attention: AttentionChoice
    delta_nets: AttentionChoice | None
    train_data: SampleDataset
    eval_data: dict[str, SampleDataset]
    tokenizer: Tokenizer | None


def prepare(
    config: RunConfig,
    train_data: DataSource | None = None,
    eval_data: EvalSource | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    must_fit: bool = True,
) -> Prepared:
    """Resolve every default, open the data, and check the run against this machine; its memory only if `must_fit`.

    This also prepares torch's allocator, before it allocates memory of the device.

    Raises ConfigError, DataError, CheckpointError or ResourceError; each message says what to change.
    """
    config = with_simulated_axes(config)
    make_deterministic(config.hardware)
    world_size = run_world_size(config.parallel)
    words = corpus_words(train_data)
    if words is not None:  # paths given in Python count as --data-path
        config, train_data = config.override({"data_path": words}), None
    device_type = resolve_device_type(config.hardware)
    planner = resolved_memory_planner(config.memory, device_type)
    dtype_name = resolved_dtype(config.training, device_type)
    config = config.override({"device": device_type, "params_dtype": dtype_name, "memory_planner": planner})
    needs = {"needs_data": train_data is None, "needs_eval_data": eval_data is None}
    check_ranks(config, this_script(), sys.argv[1:], **needs)
    if is_reporting_rank() and (told := unscaled_length(config.model, config.data.seq_length)):
        tell(f"warning: {told}")
    if train_data is None:
        check_corpora(config)
    tokenizer = tokenizer or tokenizer_of(config, has_texts=are_texts(train_data))
    own_data = own_dataset(config, train_data, "train_data", tokenizer)
    if config.training.num_epochs is not None:
        config = with_epochs(config, world_size, own_data)
        check(config, world_size, **needs)
    config = config.override({"lr": resolved_lr(config), "lr_warmup_iters": resolved_lr_warmup_iters(config)})
    config = config.override({"vocab_size": _vocab_size(config, tokenizer)})
    _check_model_and_files(config)
    device = local_device(device_type)
    prepare_allocator(config.memory, device_type)
    placement = place_on_host(config.hardware, device, microbatch_flops(config))
    dtype = torch_dtype(dtype_name)
    peak = device_peak(config.hardware, device, dtype)
    attention = choose_attention(config, device)
    delta_nets = choose_delta_nets(config, device)
    config = config.override({"attention_backend": attention.name})
    if delta_nets is not None:
        config = config.override({"delta_backend": delta_nets.name})
    is_chosen = is_undecided(config.memory)
    config = choose_memory(config, world_size, device, must_fit=must_fit)
    if not is_undecided(config.memory):
        given_profile(config, device)
    if must_fit and not is_undecided(config.memory):
        _admit(config, world_size, device, peak)
    trained = open_dataset(config, config.data.data_path if own_data is None else own_data, stream=0)
    evaluated = evaluation_data(config, eval_data, tokenizer)
    if config.data.reference_log_probs is not None and isinstance(trained, PreferencePairs):
        stored_reference(config.data.reference_log_probs, config, trained)
    return Prepared(
        config,
        world_size,
        device_type,
        dtype,
        peak,
        placement,
        is_chosen,
        attention,
        delta_nets,
        trained,
        evaluated,
        tokenizer,
    )


def field_keywords(keywords: dict[str, object]) -> dict[str, object]:
    """Turn keywords of a Trainer into fields of a run: the class of a layer becomes its name. Raises ConfigError for
    the keywords train_dataset and eval_dataset of other trainers."""
    for theirs, ours in (("train_dataset", "train_data"), ("eval_dataset", "eval_data")):
        if theirs in keywords:
            raise ConfigError(
                f"Trainer: there is no keyword '{theirs}': memo calls it {ours}: the prefix of a corpus, a list of "
                "texts, or a Dataset or iterable of token ids"
            )
    layer = keywords.get("custom_layer")
    return {**keywords, "custom_layer": layer_name(layer)} if isinstance(layer, type) else keywords


def _vocab_size(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """Resolve the vocabulary; raises ConfigError if it is smaller than the tokenizer's."""
    vocab_size = resolved_vocab_size(config.model, tokenizer.vocab_size if tokenizer else None)
    if tokenizer is not None and vocab_size < tokenizer.vocab_size:
        directory, remedy = config.checkpoint.pretrained_checkpoint, "leave it out or give at least that many"
        if directory is not None:
            remedy = (
                f"build the corpus with the tokenizer that {directory} was trained with; if tokens were added to that, "
                f"give the model rows for them in transformers, model.resize_token_embeddings({tokenizer.vocab_size})"
            )
        raise ConfigError(f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: {remedy}")
    return vocab_size


def _check_model_and_files(config: RunConfig) -> None:
    check_split(config.model, config.parallel.tp)
    check_patterns_of(config.model, config.data.seq_length)
    _check_packages(config.hardware, config.logging)
    check_files(config)
    if config.memory.offload_nvme_path is not None:
        disk_free_bytes(config.memory.offload_nvme_path)
    _check_pretrained(config)


def _check_packages(hardware: HardwareConfig, logging: LoggingConfig) -> None:
    if hardware.kernels == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "--kernels triton needs the package triton, which is not installed: install it, or use --kernels torch"
        )
    for flag, value, package in (
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", logging.wandb_project, "wandb"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{flag} {value} needs the package {package}, which is not installed: "
                f"run pip install 'memo-train[{package}]', or leave the flag out"
            )


def _check_pretrained(config: RunConfig) -> None:
    """Raises ConfigError unless the initial weights exist, are complete, and fit this model."""
    directory = pretrained_directory(config)
    if directory is None:
        return
    require(
        Path(directory).exists(),
        f"--pretrained-checkpoint {directory} does not exist: if it has moved, say where it is with --model DIR or "
        f"--pretrained-checkpoint DIR, else {download_hint(directory)}",
    )
    require(
        has_weights(directory),
        f"--pretrained-checkpoint {directory} has no weights, neither {SINGLE_FILE} nor {INDEX_FILE}: "
        f"{download_hint(directory)}, or train new ones with --pretrained-checkpoint None; other formats (.bin, .pth) "
        "must be saved as safetensors first",
    )
    open_pretrained(directory, config)
    given_adapters(config)


def _admit(config: RunConfig, world_size: int, device: torch.device, peak: PeakFlops) -> None:
    """Refuse a run that does not fit. Only the first rank of each node checks, so that its ranks cannot disagree."""
    if not is_first_of_node():
        return
    try:
        admit(config, world_size, room_of(config.memory, device), peak.flops)
    except ResourceError as error:
        overrule(config, ResourceError(f"{error}{sweeping_helps(config, world_size, device)}"))
