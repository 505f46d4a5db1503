"""Can this configuration run on this many ranks? Asked before torch is loaded or a process group exists.

Every rule raises one ConfigError that names the flags, their values and what would work instead.
Later rules rely on earlier ones (divisors of sizes that are known to be positive), so the first
broken rule ends the check.
"""

from dataclasses import fields
from math import isfinite

from memo.config.attention_kernels import DETERMINISTIC_HEAD_DIM, largest_deterministic
from memo.config.blend import read_blend, read_eval_sets
from memo.config.check_layout import check_batch, check_layout
from memo.config.check_memory import check_memory
from memo.config.check_model import check_model
from memo.config.derived import (
    resolved_lr,
    resolved_lr_decay_iters,
    resolved_lr_warmup_iters,
    resolved_lr_wsd_decay_iters,
)
from memo.config.flag_table import dashed
from memo.config.identity import DATA_FACTS, MODEL_FACTS, accepted_changes
from memo.config.require import LARGEST, require
from memo.config.run import RunConfig
from memo.config.split import read_split
from memo.config.training import TrainingConfig

# Which numbers may be zero: every other number of a section must be positive, these must not be negative.
_MAY_BE_ZERO = frozenset(
    (
        "min_lr",
        "lr_warmup_iters",
        "weight_decay",
        "clip_grad",
        "seed",
        "max_consecutive_skips",
        "check_replicas_interval",
        "eval_interval",
        "save_interval",
        "save_interval_minutes",
        "keep_latest_k",
        "simulate_rank",
        "recompute_attention_layers",
        "window_size",
    )
)
_HAS_OWN_RULE = frozenset(
    (
        "adam_beta1",
        "adam_beta2",
        "offload_alpha",
        "optimizer_offload_fraction",
        "gradient_offload_fraction",
        "weight_offload_fraction",
    )
)


def check(config: RunConfig, world_size: int, *, needs_data: bool = True, needs_eval_data: bool = True) -> None:
    """Raises ConfigError when `config` cannot run on `world_size` ranks.

    With --device auto the rules about devices wait: call again once the device is known. A caller that
    brings datasets of its own passes needs_data=False; then nothing has to name any. One that brings those of
    evaluations alone passes needs_eval_data=False.
    """
    check_ranges(config)
    check_model(config)
    check_layout(config, world_size)
    check_batch(config, world_size)
    check_memory(config)
    _check_optimizer(config)
    _check_epochs(config)
    _check_data(config, needs_data, needs_data and needs_eval_data)
    _check_hardware(config)


def check_ranges(config: RunConfig) -> None:
    """Raises ConfigError for a number that is too small, too large or not finite; the first of all rules."""
    for section in fields(config):
        values = getattr(config, section.name)
        for entry in fields(values):
            value = getattr(values, entry.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or entry.name in _HAS_OWN_RULE:
                continue
            flag = dashed(entry.name)
            default = "" if entry.default is None else f", such as the default {entry.default}"
            require(isfinite(value), f"{flag} is {value}: give a finite number{default}")
            is_count = isinstance(value, int) and entry.name != "seed"
            require(not is_count or value <= LARGEST, f"{flag} is {value}: give {LARGEST} or less")
            if entry.name in _MAY_BE_ZERO:
                require(value >= 0, f"{flag} is {value}, but it must not be below 0: give 0 or more{default}")
            else:
                require(value > 0, f"{flag} is {value}, but it must be above 0: give a positive number{default}")


def _check_optimizer(config: RunConfig) -> None:
    training, lr, warmup = config.training, resolved_lr(config), resolved_lr_warmup_iters(config)
    require(
        training.min_lr <= lr,
        f"--min-lr {training.min_lr} is above --lr {lr}, where the decay starts: give --min-lr {lr} or less",
    )
    for name, beta in (("--adam-beta1", training.adam_beta1), ("--adam-beta2", training.adam_beta2)):
        require(0 <= beta < 1, f"{name} is {beta}, but it must be in [0, 1): try 0.9 or 0.95")
    if training.lr_decay_style != "constant" and training.num_epochs is None:  # else asked again, once steps are known
        decay_iters = resolved_lr_decay_iters(config)
        decay_flag = "--train-iters" if training.lr_decay_iters is None else "--lr-decay-iters"
        require(
            warmup <= decay_iters,
            f"--lr-warmup-iters {warmup} is above {decay_flag} {decay_iters}, where the "
            f"decay ends: give --lr-warmup-iters {decay_iters} or less",
        )
    _check_wsd(config)


def _check_wsd(config: RunConfig) -> None:
    training = config.training
    if training.lr_decay_style != "WSD":
        require(
            training.lr_wsd_decay_iters is None,
            f"--lr-wsd-decay-iters {training.lr_wsd_decay_iters} fights with --lr-decay-style "
            f"{training.lr_decay_style}, which ignores it: use --lr-decay-style WSD or leave it out",
        )
        return
    if training.num_epochs is not None:
        return
    warmup = resolved_lr_warmup_iters(config)
    room = resolved_lr_decay_iters(config) - warmup
    decay = resolved_lr_wsd_decay_iters(config)
    require(
        decay <= room,
        f"--lr-wsd-decay-iters {decay} does not fit between the end of --lr-warmup-iters "
        f"{warmup} and step {resolved_lr_decay_iters(config)}: "
        f"give {room} or less, or a shorter warm-up",
    )


def _check_epochs(config: RunConfig) -> None:
    epochs, iters = config.training.num_epochs, config.training.train_iters
    if epochs is None:
        return
    require(
        iters == TrainingConfig.train_iters,
        f"--num-epochs {epochs:g} fights with --train-iters {iters}: each says how long the run is; leave one out",
    )
    require(
        not config.data.mock_data,
        f"--num-epochs {epochs:g} fights with --mock-data, which never ends: give --train-iters, or --data-path",
    )


def _check_data(config: RunConfig, needs_data: bool, needs_eval_data: bool) -> None:
    data, training, checkpoint = config.data, config.training, config.checkpoint
    if data.data_path is not None:
        read_blend("--data-path", data.data_path)
    if data.eval_data_path is not None:
        read_eval_sets(data.eval_data_path)
    _check_split(config)
    path, eval_path = " ".join(data.data_path or ()), " ".join(data.eval_data_path or ())
    require(not (data.mock_data and path), f"--mock-data and --data-path {path} fight: leave one of the two out")
    require(
        data.mock_data or path or not needs_data,
        "there is nothing to train on, as --data-path is not given and --mock-data is off: give "
        "--data-path PREFIX (`memo data demo PREFIX` makes a corpus) or --mock-data",
    )
    require(
        not (data.mock_data and eval_path),
        f"--mock-data and --eval-data-path {eval_path} fight: mock data is evaluated on mock data; "
        f"leave one of the two out",
    )
    require(
        not training.eval_interval or data.mock_data or eval_path or data.holds_out or not needs_eval_data,
        f"--eval-interval {training.eval_interval} needs evaluation data, but --eval-data-path is not given: "
        f"give --eval-data-path PREFIX, --split 98,2 or --eval-interval 0",
    )
    require(
        not eval_path or training.eval_interval,
        f"--eval-data-path {eval_path} is never read, as --eval-interval is 0: "
        f"give --eval-interval, such as 100, or leave --eval-data-path out",
    )
    require(
        not training.eval_positions or training.eval_interval,
        "--eval-positions adds to each evaluation, but --eval-interval is 0, so there is none: "
        "give --eval-interval, such as 100, or leave --eval-positions out",
    )
    require(
        not checkpoint.save_interval or checkpoint.save,
        f"--save-interval {checkpoint.save_interval} needs a place to save to, but --save is not given: "
        f"give --save DIR or --save-interval 0",
    )
    require(
        not checkpoint.save_interval_minutes or checkpoint.save,
        f"--save-interval-minutes {checkpoint.save_interval_minutes} needs a place to save to, but --save is not "
        "given: give --save DIR or leave it out",
    )
    require(
        not (config.parallel.simulate_world and (checkpoint.save or checkpoint.load)),
        f"--simulate-world {config.parallel.simulate_world} trains nothing, so there is nothing to keep: leave --save "
        f"{checkpoint.save} and --load {checkpoint.load} out",
    )
    _check_load(config)
    require(
        not checkpoint.keep_latest_k or checkpoint.save,
        f"--keep-latest-k {checkpoint.keep_latest_k} deletes checkpoints in --save, but --save is not given: "
        f"give --save DIR or --keep-latest-k 0",
    )
    require(
        not checkpoint.async_save or checkpoint.save,
        "--async-save writes to --save, but --save is not given: give --save DIR or --no-async-save",
    )


def _check_split(config: RunConfig) -> None:
    data = config.data
    if data.split is None:
        return
    read_split(data.split)
    eval_path = " ".join(data.eval_data_path or ())
    require(
        not eval_path,
        f"--split {data.split} fights with --eval-data-path {eval_path}: each says what is evaluated; leave one out",
    )
    require(
        data.data_path,
        f"--split {data.split} parts the documents of --data-path, which is not given: give it, or leave --split out",
    )


def _check_load(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    require(
        checkpoint.load or checkpoint.verify_checkpoint,
        "--no-verify-checkpoint concerns what --load reads, but --load is not given: give --load DIR or leave it out",
    )
    require(
        checkpoint.load or not checkpoint.load_accept_changes,
        f"--load-accept-changes {checkpoint.load_accept_changes} concerns what --load reads, but --load is not given: "
        "give --load DIR or leave it out",
    )
    for name in accepted_changes(checkpoint.load_accept_changes):
        require(
            name in (*MODEL_FACTS, *DATA_FACTS),
            f"--load-accept-changes names {name}, which is no field of model or data: give some of "
            f"{', '.join((*DATA_FACTS, *MODEL_FACTS))}, with commas between",
        )


_CUDA_BACKENDS = tuple(name for name in DETERMINISTIC_HEAD_DIM if name != "cpu")


def _check_hardware(config: RunConfig) -> None:
    """The device is known here only when the user names it; `auto` is checked once it is resolved."""
    hardware, dtype = config.hardware, config.training.params_dtype
    backend, device = hardware.attention_backend, hardware.device
    require(
        not (backend == "cpu" and device == "cuda"),
        "--attention-backend cpu cannot run on --device cuda: use --attention-backend auto, "
        f"{', '.join(_CUDA_BACKENDS)}, or --device cpu",
    )
    require(
        not (backend in _CUDA_BACKENDS and device == "cpu"),
        f"--attention-backend {backend} cannot run on --device cpu: use --attention-backend auto or cpu, "
        f"or --device cuda",
    )
    require(
        not (backend in _CUDA_BACKENDS and dtype in ("fp32", "fp64")),
        f"--attention-backend {backend} has no {dtype} kernels, but --params-dtype is {dtype}: "
        f"use --params-dtype bf16, or --attention-backend auto",
    )
    if hardware.deterministic and backend != "auto":
        require(
            config.model.head_dim <= DETERMINISTIC_HEAD_DIM[backend],
            f"--attention-backend {backend} fights with --deterministic: its gradients have the same bits each time "
            f"{largest_deterministic(backend)}, and heads are of {config.model.head_dim}: use --attention-backend "
            "auto, or leave --deterministic out",
        )
    require(
        not (hardware.kernels == "triton" and device == "cpu"),
        "--kernels triton cannot run on --device cpu: use --kernels torch, or --device cuda",
    )
    require(
        not (device == "cuda" and dtype in ("fp32", "fp64")),
        f"--params-dtype {dtype} cannot run on --device cuda, whose attention kernels take bf16 alone: "
        f"use --params-dtype bf16, or --device cpu",
    )
