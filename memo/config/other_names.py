"""What other trainers call things, and what memo calls them: a message, never a silent alias.

A name that looks the same often counts something else: other trainers' batch size is that of one device, memo's is that
of a whole step. So whoever types another trainer's name is told which name is memo's, and what it means. Only names of
Megatron-LM work as they stand, because memo's are the same (memo.config.flags has those that are spelled otherwise).
"""

import re
from collections.abc import Callable, Collection

_LENGTH = "memo calls it {seq_length}: tokens of one sample"
_ITERS = "memo calls it {train_iters}: optimizer steps of the run"
_EPOCHS = "memo calls it {num_epochs}: passes over {data_path}"
_MICRO = (
    "memo's {micro_batch_size} is the sequences of one forward and backward pass of one model copy, and "
    "{global_batch_size} those of a whole optimizer step over all GPUs: give these"
)
_ACCUMULATION = (
    "memo derives it: give {global_batch_size}, which is {micro_batch_size} x data-parallel copies x accumulation steps"
)
_ADAPTERS = (
    "memo trains all weights and has no adapters or quantised weights: leave it out, and where states do not fit, use "
    "{offload_states} auto, which keeps a part of them in host memory"
)
_TP = "memo calls it {tensor_model_parallel_size}, in short {tp}"
_CP = "memo calls it {context_parallel_size}, in short {cp}: ranks that share one sequence"
_PP = "memo calls it {pipeline_model_parallel_size}, in short {pp}"
_DP = "memo derives it: data-parallel copies are the ranks that torchrun starts / ({tp} x {cp} x {pp})"
_SHARDING = (
    "memo shards by itself: {data_parallel_sharding_strategy} optim is ZeRO-1, the default, optim_grads ZeRO-2, "
    "optim_grads_params ZeRO-3"
)
_MODEL = "memo calls it {model}: a preset, or the directory of a model of Hugging Face"
_DATA = (
    "memo calls it {data_path}: the prefix of a corpus, which `memo data build texts.jsonl PREFIX` makes of texts and "
    "`memo data chat chats.jsonl PREFIX --tokenizer MODEL` of conversations"
)
_TOKENIZER = "memo calls it {tokenizer}: `byte`, or a tokenizer.json; by default the one that the corpus was built with"
_SAVE = "memo calls it {save}: the directory of checkpoints, log and configuration"
_RECOMPUTE = (
    "memo calls it {recompute_granularity} full, and mostly does not need it: {offload_alpha} auto, the default, moves "
    "activations to host memory instead of computing them again"
)
_ATTENTION = "memo calls it {attention_backend}: auto, the default, takes the quickest that is installed"
_FP16 = "memo trains in bf16, fp32 or fp64, which need no loss scaling: give {params_dtype} bf16"
_NO_DROPOUT = "memo has no dropout: leave it out"
_ADAMW = "memo's optimizer is AdamW: leave it out"
_WORKERS = "memo reads samples from memory-mapped files and needs no workers: leave it out"
_EXPERTS = (
    "memo trains dense models and has no mixture of experts: leave it out, or train such a model with Megatron-LM or "
    "torchtitan"
)
_PREFERENCES = (
    "memo has no training by preferences or rewards: `memo finetune` learns answers, and TRL takes the model that it "
    "writes to SAVE/hf further"
)
_TASKS = (
    "memo runs no benchmark tasks: `memo evaluate` tells losses by position and, with --needle, what a model finds "
    "again; for tasks write the model with `memo export` and give it to lm-evaluation-harness"
)
_CHATS = "memo calls it finetune: `memo finetune --model DIR --train-data chats.jsonl --save OUT`"
_BUILD = (
    "`memo data build texts.jsonl PREFIX` makes a corpus of texts, `memo data chat chats.jsonl PREFIX --tokenizer DIR` "
    "one of conversations"
)
_ANSWER = "`memo generate --chat --model DIR --prompt TEXT` prints what a model answers"
_SERVE = (
    "memo serves no models: `memo export RUN --out DIR` writes one for Hugging Face, and `vllm serve DIR` serves it; "
    "`memo generate` tries a few prompts"
)
_CONVERT = "`memo import DIR --out CKPT` reads a model of Hugging Face, `memo export CKPT --out DIR` writes one"
_BENCHMARK = (
    "`memo train --mock-data` tells TGS and MFU of each step, `memo profile` measures one layer and the link, and "
    "trainer.benchmark() in Python gives medians; what a model knows is told by `memo evaluate`"
)

RANKS = ("gpus", "num_gpus", "n_gpus", "ngpus", "devices", "nproc_per_node", "num_processes")
"""Names of how many processes there are."""

OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(("learning_rate", "max_lr", "peak_lr"), "memo calls it {lr}: the peak learning rate"),
    **dict.fromkeys(("min_learning_rate", "lr_min"), "memo calls it {min_lr}"),
    **dict.fromkeys(("epochs", "epoch", "num_train_epochs", "max_epochs", "n_epochs"), _EPOCHS),
    **dict.fromkeys(("max_steps", "steps", "num_steps", "total_steps", "iters", "num_iterations", "max_iters"), _ITERS),
    "train_samples": "memo counts steps: give {train_iters}, which is samples / {global_batch_size}",
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size", "batch_size", "local_batch_size"), _MICRO),
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "bs", "train_batch_size", "per_gpu_train_batch_size"), _MICRO),
    "per_device_eval_batch_size": "memo evaluates with the batches of training: {micro_batch_size}",
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps", "accumulate_grad_batches"), _ACCUMULATION),
    **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "sequence_length", "sequence_len"), _LENGTH),
    **dict.fromkeys(("model_max_length", "block_size", "cutoff_len", "context_length", "ctx_len", "seqlen"), _LENGTH),
    "warmup_steps": "memo calls it {lr_warmup_iters}: optimizer steps",
    "warmup_iters": "memo calls it {lr_warmup_iters}: optimizer steps",
    "warmup_ratio": "memo counts steps: give {lr_warmup_iters}, which is the ratio x {train_iters}",
    "lr_warmup_fraction": "memo counts steps: give {lr_warmup_iters}, which is the fraction x {train_iters}",
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), "memo calls it {lr_decay_style}"),
    "adam_epsilon": "memo calls it {adam_eps}",
    **dict.fromkeys(("max_grad_norm", "gradient_clipping", "grad_clip"), "memo calls it {clip_grad}"),
    **dict.fromkeys(("optim", "optimizer"), _ADAMW),
    "logging_steps": "memo calls it {log_interval}",
    "save_steps": "memo calls it {save_interval}",
    "eval_steps": "memo calls it {eval_interval}: steps between two evaluations",
    "save_total_limit": "memo calls it {keep_latest_k}",
    **dict.fromkeys(("output_dir", "save_dir", "checkpoint_dir", "out_dir"), _SAVE),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume", "ckpt", "checkpoint"),
        "memo calls it {load}: the directory of {save} of the run that goes on",
    ),
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "pretrained_model_name_or_path"), _MODEL),
    **dict.fromkeys(("model_id", "model_path", "hf_model"), _MODEL),
    **dict.fromkeys(
        ("dataset", "dataset_name", "dataset_path", "train_dataset", "train_file", "data", "data_dir"), _DATA
    ),
    **dict.fromkeys(
        ("eval_dataset", "validation_file", "eval_data"), "memo calls it {eval_data_path}: a corpus as well"
    ),
    **dict.fromkeys(("tokenizer_name", "tokenizer_path", "tokenizer_model", "tokenizer_name_or_path"), _TOKENIZER),
    **dict.fromkeys(("tokenizer_type", "vocab_file", "merge_file"), _TOKENIZER),
    **dict.fromkeys(("tensor_parallel_size", "tensor_parallel_degree", "tp_size", "tp_degree"), _TP),
    **dict.fromkeys(("context_parallel_degree", "cp_size", "sequence_parallel_size", "sp_size", "ring_degree"), _CP),
    **dict.fromkeys(("ulysses_degree", "ulysses_size", "sp"), f"{_CP}; {{cp_comm_type}} a2a is Ulysses"),
    **dict.fromkeys(("pipeline_parallel_size", "pipeline_parallel_degree", "pp_size", "pp_degree"), _PP),
    "num_layers_per_virtual_pipeline_stage": (
        "memo counts chunks of a stage: give {vpp}, which is layers / ({pp} x layers of a chunk)"
    ),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size", "data_parallel_degree"), _DP),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "zero", "zero_stage", "deepspeed_config"), _SHARDING),
    **dict.fromkeys(RANKS, "torchrun decides it: `torchrun --nproc-per-node 8 -m memo train ...` starts eight"),
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "torchrun decides it: see docs/launching.md"),
    **dict.fromkeys(("lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora"), _ADAPTERS),
    **dict.fromkeys(
        ("peft", "use_lora", "use_peft", "peft_config", "qlora", "load_in_4bit", "load_in_8bit"), _ADAPTERS
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_router_topk"), _EXPERTS),
    **dict.fromkeys(("expert_model_parallel_size", "ep"), _EXPERTS),
    **dict.fromkeys(("dpo", "rlhf", "grpo", "ref_model"), _PREFERENCES),
    **dict.fromkeys(("tasks", "num_fewshot"), _TASKS),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), _RECOMPUTE),
    **dict.fromkeys(("recompute_method", "recompute_num_layers"), _RECOMPUTE),
    **dict.fromkeys(("attn_implementation", "use_flash_attention_2", "flash_attention", "flash_attn"), _ATTENTION),
    **dict.fromkeys(("fp16", "half", "mixed_precision"), _FP16),
    **dict.fromkeys(("torch_dtype", "precision"), "memo calls it {params_dtype}: bf16, fp32 or fp64"),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout"), _NO_DROPOUT),
    **dict.fromkeys(("report_to", "wandb"), "memo calls it {wandb_project} NAME, or {tensorboard_dir} DIR"),
    "logging_dir": "memo calls it {tensorboard_dir}",
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), _WORKERS),
    "cpu_offload": "memo calls it {offload_states} for weights and optimizer, {offload_alpha} for activations",
    "rope_theta": "memo calls it {rotary_base}",
    "num_hidden_layers": "memo calls it {num_layers}",
    "intermediate_size": "memo calls it {ffn_hidden_size}",
    "num_key_value_heads": "memo calls it {num_query_groups}: key/value heads",
    "head_dim": "memo calls it {kv_channels}",
    "tie_word_embeddings": "memo calls the opposite {untie_embeddings_and_output_weights}",
}
"""{name: what to do}; names in braces are fields of memo."""

OTHER_COMMANDS: dict[str, str] = {
    **dict.fromkeys(("sft", "fine-tune", "instruct"), _CHATS),
    **dict.fromkeys(
        ("lora", "peft"), "memo trains all weights and has no adapters: `memo finetune` learns conversations"
    ),
    **dict.fromkeys(("dpo", "rlhf"), _PREFERENCES),
    **dict.fromkeys(("chat", "inference", "infer"), _ANSWER),
    **dict.fromkeys(("serve", "server"), _SERVE),
    **dict.fromkeys(("convert", "convert-checkpoint"), _CONVERT),
    **dict.fromkeys(("preprocess", "preprocess-data", "tokenize", "tokenise"), _BUILD),
    **dict.fromkeys(("benchmark", "bench"), _BENCHMARK),
}
"""{a command of other trainers, with dashes: what to do}."""

_CHOSEN = "memo plan chooses it: --explain 'tp4 cp2 pp1 mbs1' takes one layout apart, memo estimate asks about one"
NAMES_ELSEWHERE: dict[str, dict[str, str]] = {
    "memo plan": {
        **dict.fromkeys(
            ("tp", "cp", "pp", "vpp", "mbs", "tensor_model_parallel_size", "context_parallel_size"), _CHOSEN
        ),
        **dict.fromkeys(("pipeline_model_parallel_size", "micro_batch_size", "offload_alpha"), _CHOSEN),
        **dict.fromkeys(("num_gpus", "n_gpus", "ngpus"), "did you mean --gpus VALUE?"),
        **dict.fromkeys(
            ("batch_size", "train_batch_size"), "memo plan calls it --global-batch-size: of a step, all GPUs"
        ),
    },
    "memo import": dict.fromkeys(
        ("model", "model_name_or_path", "input"),
        "the directory stands alone: `memo import VALUE --out CHECKPOINT`",
    ),
    "memo export": dict.fromkeys(
        ("load", "model", "checkpoint", "input"),
        "the directory of the run stands alone: `memo export VALUE --out DIR`",
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
