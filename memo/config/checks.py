"""Can this configuration run on this many ranks? Asked before torch is loaded or a process group exists.

Every rule raises one ConfigError that names the flags, their values and what would work instead.
Later rules rely on earlier ones (divisors of sizes that are known to be positive), so the first
broken rule ends the check.
"""

from memo.config.attention_kernels import CAPPING, DETERMINISTIC_HEAD_DIM, largest_deterministic
from memo.config.blend import read_blend, read_eval_sets
from memo.config.check_fields import Conflict, check_conflicts, check_fields, given
from memo.config.check_layout import check_batch, check_layout
from memo.config.check_memory import check_memory
from memo.config.check_model import check_model
from memo.config.derived import (
    global_batch_size,
    resolved_lr,
    resolved_lr_decay_iters,
    resolved_lr_warmup_iters,
    resolved_lr_wsd_decay_iters,
    trains_adapters_alone,
)
from memo.config.flag_table import dashed
from memo.config.identity import DATA_FACTS, MODEL_FACTS, accepted_changes
from memo.config.layer_words import LINEAR
from memo.config.require import require, require_most
from memo.config.run import RunConfig
from memo.config.split import read_split
from memo.config.training import TrainingConfig

_CONFLICTS: tuple[Conflict, ...] = (
    ("num_epochs", ("train_iters",), "each says how long the run is"),
    ("num_epochs", ("mock_data",), "mock data never ends"),
    ("mock_data", ("data_path",), "each says what is trained on"),
    ("mock_data", ("eval_data_path",), "mock data is evaluated on mock data"),
    ("split", ("eval_data_path",), "each says what is evaluated"),
    ("simulate_world", ("save", "load"), "one rank alone trains nothing, so there is nothing to keep"),
    ("preference", ("mock_data",), "mock data has no pairs"),
    ("preference", ("eval_positions",), "pairs have losses, and tokens have none"),
)


def check(config: RunConfig, world_size: int, *, needs_data: bool = True, needs_eval_data: bool = True) -> None:
    """Raises ConfigError when `config` cannot run on `world_size` ranks.

    With --device auto the rules about devices wait: call again once the device is known. A caller with datasets of its
    own passes needs_data=False, one with evaluation datasets of its own needs_eval_data=False; the configuration then
    need not name them.
    """
    check_conflicts(config, _CONFLICTS)
    check_fields(config, "parallel", "training", "data", "checkpoint", "logging", "hardware")
    check_model(config)
    check_layout(config, world_size)
    check_batch(config, world_size)
    check_memory(config)
    _check_optimizer(config)
    _check_data(config, needs_data, needs_data and needs_eval_data)
    if config.training.preference is not None:
        check_preference(config, global_batch_size(config, world_size))
    _check_hardware(config)


_LEAST_DECAY_IN_BF16 = 2.0**-8
"""bf16 has 8 significant bits: from 1 to 2 its numbers lie 2^-7 apart, and rounding undoes a change of less than half
of that. A step without a gradient takes the share 1 - beta of a moment; a share of 2^-8 or more is never rounded
away."""


def _check_optimizer(config: RunConfig) -> None:
    training, lr = config.training, resolved_lr(config)
    require_most("--min-lr", training.min_lr, f"--lr {lr}, where the decay starts", lr)
    for name, beta in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
        decay = 1 - getattr(training, beta)
        require(
            getattr(training, name) != "bf16" or decay >= _LEAST_DECAY_IN_BF16,
            f"{dashed(name)} bf16 conflicts with {dashed(beta)} {getattr(training, beta)}: a step takes {decay:.2g} of "
            f"a moment, and bf16 rounds changes below {_LEAST_DECAY_IN_BF16:.2g} away, so it would never decay: give "
            f"{dashed(beta)} {getattr(TrainingConfig, beta)}, or {dashed(name)} fp32",
        )
    if training.lr_decay_style == "constant" or training.num_epochs is not None:  # asked again, once steps are known
        return
    warmup, ends = resolved_lr_warmup_iters(config), resolved_lr_decay_iters(training)
    flag = "--train-iters" if training.lr_decay_iters is None else "--lr-decay-iters"
    require_most("--lr-warmup-iters", warmup, f"{flag} {ends}, where the decay ends", ends)
    if training.lr_decay_style == "WSD":
        decay, room = resolved_lr_wsd_decay_iters(training), f"the steps from --lr-warmup-iters {warmup} to step {ends}"
        require_most("--lr-wsd-decay-iters", decay, room, ends - warmup)


def _check_data(config: RunConfig, needs_data: bool, needs_eval_data: bool) -> None:
    data, interval = config.data, config.training.eval_interval
    if data.data_path is not None:
        read_blend("--data-path", data.data_path)
    if data.eval_data_path is not None:
        read_eval_sets(data.eval_data_path)
    if data.split is not None:
        read_split(data.split)
    require(
        data.mock_data or data.data_path or not needs_data,
        "there are no data to read, as --data-path is not given and --mock-data is off: give "
        "--data-path PREFIX (`memo data demo PREFIX` makes a corpus) or --mock-data",
    )
    require(
        not interval or data.mock_data or data.eval_data_path or data.holds_out or not needs_eval_data,
        f"--eval-interval {interval} needs evaluation data, but --eval-data-path is not given: give --eval-data-path "
        "PREFIX, --split 98,2 or --eval-interval 0",
    )
    for name in accepted_changes(config.checkpoint.load_accept_changes):
        require(
            name in (*MODEL_FACTS, *DATA_FACTS),
            f"--load-accept-changes names {name}, which is no field of model or data: give some of "
            f"{', '.join((*DATA_FACTS, *MODEL_FACTS))}, with commas between",
        )


def check_preference(config: RunConfig, batch: int) -> None:
    """Rules of --preference that need no data; whether the data are pairs is known once they are opened."""
    adapters_alone = trains_adapters_alone(config.model)
    require(
        adapters_alone or config.data.reference_log_probs is not None,
        "--preference needs a reference, which is the model where adapters alone are trained: give --lora-rank 16 "
        "without --train-only, or --reference-log-probs FILE, which the run writes before its first step",
    )
    require(
        adapters_alone or not config.training.eval_interval,
        f"--eval-interval {config.training.eval_interval} compares pairs with the reference in memory, which is the "
        "model where adapters alone are trained: give --lora-rank 16 without --train-only, or leave out the evaluation",
    )
    require(
        batch % 2 == 0,
        "--preference has a chosen answer in one sequence and the rejected one in the next, but --global-batch-size is "
        f"{batch}: give an even number",
    )


_CUDA_BACKENDS = tuple(name for name in DETERMINISTIC_HEAD_DIM if name not in ("cpu", "torch"))
_RUNS_ON = (
    ("attention_backend", ("cpu",), "cpu", f"--attention-backend auto, {', '.join(_CUDA_BACKENDS)}"),
    ("attention_backend", _CUDA_BACKENDS, "cuda", "--attention-backend auto or cpu"),
    ("delta_backend", ("fla",), "cuda", "--delta-backend auto or torch"),
    ("kernels", ("triton",), "cuda", "--kernels torch"),
    ("params_dtype", ("fp32", "fp64"), "cpu", "--params-dtype bf16"),
    ("offload_backend", ("cuda",), "cuda", "--offload-backend auto, virtual or threads"),
    ("offload_backend", ("virtual", "threads"), "cpu", "--offload-backend auto or cuda"),
    ("offload_check_races", (True,), "cpu", "--no-offload-check-races"),
)
"""(field, values, the device alone on which these run, what to give elsewhere)."""


def _check_hardware(config: RunConfig) -> None:
    """The device is known here only when the user names it; `auto` is checked once it is resolved."""
    hardware, dtype = config.hardware, config.training.params_dtype
    backend = hardware.attention_backend
    values = {**vars(hardware), **vars(config.training), **(vars(config.memory) if config.memory.swaps else {})}
    for name, only, device, use in _RUNS_ON:
        require(
            hardware.device in ("auto", device) or values.get(name) not in only,
            f"{given(config, name)} cannot run on --device {hardware.device}: use {use}, or --device {device}",
        )
    cap = config.model.attn_logit_softcapping
    require(
        cap == 0 or backend in ("auto", *CAPPING),
        f"--attention-backend {backend} cannot cap scores, but --attn-logit-softcapping is {cap}: use "
        f"--attention-backend auto, {' or '.join(CAPPING)}",
    )
    require(
        not (backend in _CUDA_BACKENDS and dtype in ("fp32", "fp64")),
        f"--attention-backend {backend} has no {dtype} kernels, but --params-dtype is {dtype}: "
        f"use --params-dtype bf16, or --attention-backend auto",
    )
    require(
        hardware.delta_backend == "auto" or LINEAR in config.model.types_of_layers,
        f"--delta-backend {hardware.delta_backend} is read where --layer-types names {LINEAR}, but it is "
        f"{config.model.layer_types or 'not given'}: leave --delta-backend out",
    )
    require(
        not (hardware.delta_backend == "fla" and dtype in ("fp32", "fp64")),
        f"--delta-backend fla has no {dtype} kernels, but --params-dtype is {dtype}: use --params-dtype bf16, or "
        "--delta-backend auto",
    )
    require(
        not (hardware.delta_backend == "fla" and hardware.deterministic),
        "--delta-backend fla conflicts with --deterministic: it chooses its kernels by their speed at each start: use "
        "--delta-backend auto, or leave --deterministic out",
    )
    if hardware.deterministic and backend != "auto":
        require(
            config.model.head_dim <= DETERMINISTIC_HEAD_DIM[backend],
            f"--attention-backend {backend} conflicts with --deterministic: its gradients have the same bits each time "
            f"{largest_deterministic(backend)}, and heads are of {config.model.head_dim}: use --attention-backend "
            "auto, or leave --deterministic out",
        )
