"""What other trainers call things, and what memo calls them: a message, never a silent alias.

A name that looks the same often counts something else: other trainers' batch size is that of one device, memo's is that
of a whole step. So whoever types another trainer's name is told which name is memo's, and what it means. Only names of
Megatron-LM work as they stand, because memo's are the same (memo.config.flags has those that are spelled otherwise).
"""

import re
from collections.abc import Callable, Collection

_LENGTH = "memo calls it {seq_length}: tokens of one sample"
_EPOCHS = "memo calls it {num_epochs}: passes over {data_path}"
_MICRO = (
    "memo's {micro_batch_size} is the sequences of one forward and backward pass of one model copy, and "
    "{global_batch_size} those of a whole optimizer step over all GPUs: give these"
)
_ADAPTERS = "memo's adapters are LoRA's: give {lora_rank} 16, say, and `memo finetune` trains and writes them"
_QUANTISED = "memo calls it {quantize} nf4 (4 bits) or int8, beside {lora_rank} 16, say"
_MODEL = "memo calls it {model}: a preset, or the directory of a model of Hugging Face"
_SCHEDULE = "memo calls it {lr_decay_style}"
_ADAMW = "memo's optimizer is AdamW: leave it out"
_SHARDING = (
    "memo shards by itself: {data_parallel_sharding_strategy} optim is ZeRO-1, the default, optim_grads ZeRO-2, "
    "optim_grads_params ZeRO-3"
)
_DATA = (
    "memo calls it {data_path}: the prefix of a corpus, which `memo data build texts.jsonl PREFIX` makes of texts and "
    "`memo data chat chats.jsonl PREFIX --tokenizer MODEL` of conversations"
)
_BUILD = (
    "`memo data build texts.jsonl PREFIX` makes a corpus of texts, `memo data chat chats.jsonl PREFIX --tokenizer DIR` "
    "one of conversations"
)
_NO_DROPOUT = "memo has no dropout: leave it out"
_PREFERENCES = (
    "memo calls it --preference dpo: `memo finetune --preference dpo --model DIR --lora-rank 16 --train-data "
    "pairs.jsonl --save OUT`"
)

RANKS = ("gpus", "num_gpus", "nproc_per_node")
"""Names of how many processes there are."""

OTHER_NAMES: dict[str, str] = {
    "learning_rate": "memo calls it {lr}: the peak learning rate",
    "num_train_epochs": _EPOCHS,
    "epochs": _EPOCHS,
    "max_steps": "memo calls it {train_iters}: optimizer steps of the run",
    "train_samples": "memo counts steps: give {train_iters}, which is samples / {global_batch_size}",
    "per_device_train_batch_size": _MICRO,
    "batch_size": _MICRO,
    "gradient_accumulation_steps": (
        "memo derives it: give {global_batch_size}, which is {micro_batch_size} x data-parallel copies x accumulation "
        "steps"
    ),
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "sequence_len": _LENGTH,
    "warmup_steps": "memo calls it {lr_warmup_iters}: optimizer steps",
    "warmup_ratio": "memo counts steps: give {lr_warmup_iters}, which is the ratio x {train_iters}",
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "max_grad_norm": "memo calls it {clip_grad}",
    "optim": _ADAMW,
    "optimizer": _ADAMW,
    "use_precision_aware_optimizer": "{exp_avg_dtype} bf16 and {exp_avg_sq_dtype} bf16 suffice: leave it out",
    "logging_steps": "memo calls it {log_interval}",
    "save_steps": "memo calls it {save_interval}",
    "saves_per_epoch": "memo counts steps: give {save_interval}, or minutes with {save_interval_minutes}",
    "eval_steps": "memo calls it {eval_interval}: steps between two evaluations",
    "save_total_limit": "memo calls it {keep_latest_k}",
    "output_dir": "memo calls it {save}: the directory of checkpoints, log and configuration",
    "resume_from_checkpoint": "memo calls it {load}: the directory of {save} of the run that goes on",
    "model_name_or_path": _MODEL,
    "base_model": _MODEL,
    "dataset": _DATA,
    "dataset_name": _DATA,
    "sample_packing": "memo calls it {packing}, and does it unless told otherwise",
    "val_set_size": "`memo finetune` calls it --eval-fraction: the share of the conversations that is held out",
    "tokenizer_model": (
        "memo calls it {tokenizer}: `byte`, or a tokenizer.json; by default the one that the corpus was built with"
    ),
    "tensor_parallel_size": "memo calls it {tensor_model_parallel_size}, in short {tp}",
    "pipeline_parallel_size": "memo calls it {pipeline_model_parallel_size}, in short {pp}",
    "sequence_parallel_size": "memo calls it {context_parallel_size}, in short {cp}: ranks that share one sequence",
    "data_parallel_size": (
        "memo derives it: data-parallel copies are the ranks that torchrun starts / ({tp} x {cp} x {pp})"
    ),
    "fsdp": _SHARDING,
    "deepspeed": _SHARDING,
    **dict.fromkeys(RANKS, "torchrun decides it: `torchrun --nproc-per-node 8 -m memo train ...` starts eight"),
    "nnodes": "torchrun decides it: see docs/launching.md",
    "lora_r": "memo calls it {lora_rank}",
    **dict.fromkeys(("peft", "use_peft", "adapter"), _ADAPTERS),
    **dict.fromkeys(("qlora", "load_in_4bit", "load_in_8bit"), _QUANTISED),
    "lora_target_linear": "memo calls it {lora_target_modules} all-linear, which is the default",
    "target_modules": "memo calls it {lora_target_modules}",
    **dict.fromkeys(("use_rslora", "peft_use_rslora"), "memo calls it {lora_use_rslora}"),
    "lora_model_dir": "memo calls it {lora_checkpoint}: a directory that PEFT or `memo export` wrote",
    **dict.fromkeys(
        ("modules_to_save", "lora_modules_to_save", "unfrozen_parameters"),
        "memo calls it {train_only}: patterns of the names of parameters that are trained beside LoRA's adapters",
    ),
    "dpo": _PREFERENCES,
    "tasks": (
        "memo runs no benchmark tasks: `memo evaluate` tells losses by position and, with --needle, what a model finds "
        "again; for tasks write the model with `memo export` and give it to lm-evaluation-harness"
    ),
    "gradient_checkpointing": (
        "memo calls it {recompute_granularity} full, and mostly does not need it: {offload_alpha} auto, the default, "
        "moves activations to host memory instead of computing them again"
    ),
    "attn_implementation": (
        "memo calls it {attention_backend}: auto, the default, takes the quickest that is installed"
    ),
    "fp16": "memo trains in bf16, fp32 or fp64, which need no loss scaling: give {params_dtype} bf16",
    "torch_dtype": "memo calls it {params_dtype}: bf16, fp32 or fp64",
    "attention_dropout": _NO_DROPOUT,
    "hidden_dropout": _NO_DROPOUT,
    "lora_dropout": _NO_DROPOUT,
    "report_to": "memo calls it {wandb_project} NAME, or {tensorboard_dir} DIR",
}
"""{name: what to do}; names in braces are fields of memo."""

OTHER_COMMANDS: dict[str, str] = {
    "sft": "memo calls it finetune: `memo finetune --model DIR --train-data chats.jsonl --save OUT`",
    "lora": ("`memo finetune --lora-rank 16 --model DIR --train-data chats.jsonl --save OUT` trains adapters of LoRA"),
    "dpo": _PREFERENCES,
    "chat": "`memo generate --chat --model DIR --prompt TEXT` prints what a model answers",
    "serve": (
        "memo serves no models: `memo export RUN --out DIR` writes one for Hugging Face, and `vllm serve DIR` serves "
        "it; `memo generate` tries a few prompts"
    ),
    "convert": "`memo import DIR --out CKPT` reads a model of Hugging Face, `memo export CKPT --out DIR` writes one",
    **dict.fromkeys(("preprocess", "preprocess-data", "tokenize"), _BUILD),
    "benchmark": (
        "`memo train --mock-data` tells TGS and MFU of each step, `memo profile` measures one layer and the link, and "
        "trainer.benchmark() in Python gives medians; what a model knows is told by `memo evaluate`"
    ),
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
    """What to do instead of `name`, which is another trainer's; empty for a name that no other is known to have.

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
