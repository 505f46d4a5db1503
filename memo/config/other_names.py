"""Names in other trainers and memo's names for the same things: a message, never a silent alias.

A name that looks the same often counts something else: other trainers' batch size is that of one device, memo's is that
of a whole step. So a name that most scripts of Hugging Face's Trainer, TRL and axolotl have is answered with memo's
name and its meaning. Names of Megatron-LM work as they stand, because memo's are the same (memo.config.flags has those
that are spelled otherwise). All other names are answered with the nearest name of memo.
"""

import re
from collections.abc import Callable, Collection

_LENGTH = "memo calls it {seq_length}: tokens of one sample"
_MICRO = (
    "memo's {micro_batch_size} is the sequences of one forward and backward pass of one model copy, and "
    "{global_batch_size} those of a whole optimizer step over all GPUs: give these"
)
_MODEL = "memo calls it {model}: a preset, or the directory of a model of Hugging Face"
_RANKS = "that is torchrun's: `torchrun --nproc-per-node 8 -m memo train ...` starts one rank for each of eight GPUs"
_BUILD = (
    "`memo data build texts.jsonl PREFIX` makes a corpus of texts, `memo data chat chats.jsonl PREFIX --tokenizer DIR` "
    "one of conversations"
)

OTHER_NAMES: dict[str, str] = {
    "learning_rate": "memo calls it {lr}: the peak learning rate",
    "num_train_epochs": "memo calls it {num_epochs}: passes over {data_path}",
    "max_steps": "memo calls it {train_iters}: optimizer steps of the run",
    "per_device_train_batch_size": _MICRO,
    "batch_size": _MICRO,
    "gradient_accumulation_steps": (
        "memo derives it: give {global_batch_size}, which is {micro_batch_size} x data-parallel copies x accumulation "
        "steps"
    ),
    **dict.fromkeys(("max_length", "max_seq_length", "sequence_len"), _LENGTH),
    "warmup_steps": "memo calls it {lr_warmup_iters}: optimizer steps",
    "warmup_ratio": "memo counts steps: give {lr_warmup_iters}, which is the ratio x {train_iters}",
    "lr_scheduler_type": "memo calls it {lr_decay_style}",
    "max_grad_norm": "memo calls it {clip_grad}",
    "logging_steps": "memo calls it {log_interval}",
    "save_steps": "memo calls it {save_interval}",
    "eval_steps": "memo calls it {eval_interval}: steps between two evaluations",
    "output_dir": "memo calls it {save}: the directory of checkpoints, log and configuration",
    "resume_from_checkpoint": "memo calls it {load}: the directory of {save} of the run that goes on",
    **dict.fromkeys(("model_name_or_path", "base_model"), _MODEL),
    "dataset_name": f"memo calls it {{data_path}}: the prefix of a corpus; {_BUILD}",
    "tensor_parallel_size": "memo calls it {tensor_model_parallel_size}, in short {tp}",
    "deepspeed": (
        "memo shards by itself: {data_parallel_sharding_strategy} optim is ZeRO-1, the default, optim_grads ZeRO-2, "
        "optim_grads_params ZeRO-3"
    ),
    **dict.fromkeys(("gpus", "num_gpus", "nproc_per_node"), _RANKS),
    "lora_r": "memo calls it {lora_rank}",
    "lora_dropout": "memo has no dropout: leave it out",
    "load_in_4bit": "memo calls it {quantize} nf4 (4 bits) or int8, beside {lora_rank} 16, say",
    "gradient_checkpointing": (
        "memo calls it {recompute_granularity} full, and mostly does not need it: {offload_alpha} auto, the default, "
        "moves activations to host memory instead of computing them again"
    ),
    "fp16": "memo trains in bf16, fp32 or fp64, which need no loss scaling: give {params_dtype} bf16",
    "report_to": "memo calls it {wandb_project} NAME, or {tensorboard_dir} DIR",
}
"""{name: what to do}; names in braces are fields of memo."""

OTHER_COMMANDS: dict[str, str] = {
    "sft": "memo calls it finetune: `memo finetune --model DIR --train-data chats.jsonl --save OUT`",
    "chat": "`memo generate --chat --model DIR --prompt TEXT` prints what a model answers",
    "serve": "`memo export RUN --out DIR` writes a model for Hugging Face, and `vllm serve DIR` serves it",
    "convert": "`memo import DIR --out CKPT` reads a model of Hugging Face, `memo export CKPT --out DIR` writes one",
    **dict.fromkeys(("preprocess-data", "tokenize"), _BUILD),
}
"""{a command of other trainers, with dashes: what to do}."""

_CHOSEN = "memo plan chooses it: --explain 'tp4 cp2 pp1 mbs1' takes one layout apart, memo estimate asks about one"
NAMES_ELSEWHERE: dict[str, dict[str, str]] = {
    "memo plan": {
        **dict.fromkeys(("tp", "cp", "pp", "vpp", "mbs", "micro_batch_size", "offload_alpha"), _CHOSEN),
        "num_gpus": "did you mean --gpus VALUE?",
        "batch_size": "memo plan calls it --global-batch-size: of a step, all GPUs",
    },
    "memo import": {"model": "the directory stands alone: `memo import VALUE --out CHECKPOINT`"},
    "memo export": dict.fromkeys(
        ("load", "model", "checkpoint"), "the directory of the run stands alone: `memo export VALUE --out DIR`"
    ),
}
"""{command: {a name that its own flags have elsewhere: what to do}}; VALUE stands for what was given."""


def advice(name: str, known: Collection[str], written: Callable[[str], str], asked: str = "memo train") -> str:
    """What to do instead of `name`, which is another trainer's; empty for a name of no trainer that memo knows.

    Args:
        known: names of the fields of the command that was asked, aliases included.
        written: a field as the user writes it there: with dashes on the command line, as it is in Python.
        asked: the command, for fields that it does not have.
    """
    text = OTHER_NAMES.get(name, "")
    fields = re.findall(r"\{(\w+)\}", text)
    answer = filled(text, written)
    return answer if not fields or fields[0] in known else f"{asked} does not need it; for memo train, {answer}"


def filled(text: str, written: Callable[[str], str]) -> str:
    """`text` of OTHER_NAMES with the names in braces as `written` writes them."""
    return re.sub(r"\{(\w+)\}", lambda found: written(found[1]), text)
