"""Can this configuration run on this many ranks? Asked before torch is loaded or a process group exists.

Every rule raises one ConfigError that names the flags, their values and what would work instead.
Later rules rely on earlier ones (divisors of sizes that are known to be positive), so the first
broken rule ends the check.
"""

from dataclasses import fields

from memo.artifacts.fields import checked, field_types
from memo.artifacts.reading import Source
from memo.config.attention_kernels import DETERMINISTIC_HEAD_DIM, largest_deterministic
from memo.config.blend import read_blend, read_eval_sets
from memo.config.check_layout import check_batch, check_layout
from memo.config.check_memory import check_memory
from memo.config.check_model import check_model
from memo.config.check_preference import check_preference
from memo.config.derived import (
    resolved_lr,
    resolved_lr_decay_iters,
    resolved_lr_warmup_iters,
    resolved_lr_wsd_decay_iters,
)
from memo.config.flag_table import dashed
from memo.config.identity import DATA_FACTS, MODEL_FACTS, accepted_changes
from memo.config.require import require
from memo.config.run import RunConfig
from memo.config.split import read_split
from memo.config.training import TrainingConfig
from memo.config.unread import given, require_read, require_with
from memo.errors import ConfigError


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
    check_preference(config, world_size)
    _check_hardware(config)


def check_ranges(config: RunConfig) -> None:
    """Raises ConfigError for a number that the type of its field does not accept; the first of all rules."""
    for section in fields(config):
        values = getattr(config, section.name)
        kind: type = type(values)
        for entry in fields(values):
            value = getattr(values, entry.name)
            if isinstance(value, int | float):
                remedy = "leave it out" if entry.default is None else f"the default {entry.default}"
                checked(field_types(kind)[entry.name], value, dashed(entry.name), Source("", ConfigError, remedy))


_LEAST_DECAY_IN_BF16 = 2.0**-8
"""bf16 has 8 significant bits: from 1 to 2 its numbers lie 2^-7 apart, and rounding undoes a change of less than half
of that. A step without a gradient takes 1 - beta of a moment: from 2^-8 on that is enough, whatever the moment is."""


def _check_moments(training: TrainingConfig) -> None:
    for name, beta in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
        decay = 1 - getattr(training, beta)
        require(
            getattr(training, name) != "bf16" or decay >= _LEAST_DECAY_IN_BF16,
            f"{dashed(name)} bf16 fights with {dashed(beta)} {getattr(training, beta)}: a step takes {decay:.2g} of a "
            f"moment, and bf16 rounds changes below {_LEAST_DECAY_IN_BF16:.2g} away, so it would never decay: give "
            f"{dashed(beta)} {getattr(TrainingConfig, beta)}, or {dashed(name)} fp32",
        )


def _check_optimizer(config: RunConfig) -> None:
    training, lr, warmup = config.training, resolved_lr(config), resolved_lr_warmup_iters(config)
    require(
        training.min_lr <= lr,
        f"--min-lr {training.min_lr} is above --lr {lr}, where the decay starts: give --min-lr {lr} or less",
    )
    if training.lr_decay_style != "constant" and training.num_epochs is None:  # else asked again, once steps are known
        decay_iters = resolved_lr_decay_iters(config)
        decay_flag = "--train-iters" if training.lr_decay_iters is None else "--lr-decay-iters"
        require(
            warmup <= decay_iters,
            f"--lr-warmup-iters {warmup} is above {decay_flag} {decay_iters}, where the "
            f"decay ends: give --lr-warmup-iters {decay_iters} or less",
        )
    _check_wsd(config)
    _check_moments(training)


def _check_wsd(config: RunConfig) -> None:
    training = config.training
    style = training.lr_decay_style
    require_read(training, "lr_wsd_decay_iters", style == "WSD", f"--lr-decay-style {style}", "--lr-decay-style WSD")
    if style != "WSD" or training.num_epochs is not None:
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
    require_with(training, "eval_positions", training.eval_interval, "--eval-interval", "100")
    for name in ("save_interval", "save_interval_minutes", "keep_latest_k", "async_save"):
        if getattr(checkpoint, name):  # 0 minutes are no default, but ask for nothing
            require_with(checkpoint, name, checkpoint.save, "--save", "DIR")
    require(
        not (config.parallel.simulate_world and (checkpoint.save or checkpoint.load)),
        f"--simulate-world {config.parallel.simulate_world} trains nothing, so there is nothing to keep: leave --save "
        f"{checkpoint.save} and --load {checkpoint.load} out",
    )
    _check_load(config)


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
    for name in ("verify_checkpoint", "load_accept_changes"):
        require_with(checkpoint, name, checkpoint.load, "--load", "DIR")
    for name in accepted_changes(checkpoint.load_accept_changes):
        require(
            name in (*MODEL_FACTS, *DATA_FACTS),
            f"--load-accept-changes names {name}, which is no field of model or data: give some of "
            f"{', '.join((*DATA_FACTS, *MODEL_FACTS))}, with commas between",
        )


_CUDA_BACKENDS = tuple(name for name in DETERMINISTIC_HEAD_DIM if name != "cpu")
_RUNS_ON = (
    ("hardware", "attention_backend", ("cpu",), "cpu", f"--attention-backend auto, {', '.join(_CUDA_BACKENDS)}"),
    ("hardware", "attention_backend", _CUDA_BACKENDS, "cuda", "--attention-backend auto or cpu"),
    ("hardware", "kernels", ("triton",), "cuda", "--kernels torch"),
    ("training", "params_dtype", ("fp32", "fp64"), "cpu", "--params-dtype bf16"),
    ("memory", "offload_backend", ("cuda",), "cuda", "--offload-backend auto, virtual or threads"),
    ("memory", "offload_backend", ("virtual", "threads"), "cpu", "--offload-backend auto or cuda"),
    ("memory", "offload_check_races", (True,), "cpu", "--no-offload-check-races"),
)
"""(section, field, values, the device alone on which these run, what to give elsewhere)."""


def _check_hardware(config: RunConfig) -> None:
    """The device is known here only when the user names it; `auto` is checked once it is resolved."""
    hardware, dtype = config.hardware, config.training.params_dtype
    backend = hardware.attention_backend
    for section, name, values, device, use in _RUNS_ON:
        is_read = section != "memory" or config.memory.swaps
        runs = hardware.device in ("auto", device) or getattr(getattr(config, section), name) not in values
        require(
            runs or not is_read,
            f"{given(getattr(config, section), name)} cannot run on --device {hardware.device}: use {use}, or --device "
            f"{device}",
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
