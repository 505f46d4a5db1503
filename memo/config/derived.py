"""Values that follow from a checked RunConfig. Each is computed here and nowhere else."""

import math
import os
from dataclasses import dataclass

from memo.config.attention_kernels import backend_by_capability, kernels_for
from memo.config.memory import MemoryConfig, MemoryPlanner
from memo.config.model import ModelConfig
from memo.config.parallel import ParallelConfig
from memo.config.require import require
from memo.config.run import RunConfig
from memo.config.training import Dtype, Preference, TrainingConfig

DEFAULT_TILES = 8
"""Tiles in which layers are computed under a swap plan. They bound the memory of a layer besides its slot, and are long
enough for efficient kernels."""
EXPERT_ROWS = 2048
"""Rows of an expert in a tile on average, if the sequence is long enough. A tile reads the weights of all experts, and
adds to the sums of their gradients by one kernel for each, or two for an adapter, however few rows they have. With 512
rows, as tiles of 8,192 tokens give each expert of Qwen3-30B-A3B, a step of 64K tokens is a tenth longer, and with LoRA
a fifth (foreseen)."""
RESIDENT_TILE_TOKENS = 8192
"""Tokens of a tile without a swap plan: products of 8192 rows are as efficient as larger ones (memo.simulate.kernels),
and the working memory of a layer is small."""
SWEPT_TOKENS = (32768, 16384, 4096)
"""Tokens of a rank in one tile where layers are swept: the fastest, one nearly as fast, one for least memory.

A tile costs launches, messages and sums of the gradients of all keys before it, whatever its size. For a 7B or 8B model
over tp 8, that is 1 %, 2 % and 7 to 10 % of a step of 262,144 tokens (foreseen; benchmarks/sweep_speed.py), and less of
a longer step. Tiles of 32,768 tokens take 1.5 GiB more there than the smallest, and without tp six times as much.
"""
SLOT_TILES = 4
"""Tiles in one slot where layers are swept, so shares that move are multiples of a quarter. Each slot costs a wait: in
slots of one tile a step of 262,144 tokens takes 1 to 3 % more (benchmarks/sweep_speed.py)."""
BYTE_VOCAB_SIZE = 257
"""256 bytes and the end of document: the vocabulary of mock data when nobody names one."""


@dataclass(frozen=True)
class LearningRate:
    """Defaults: `peak` of --lr; --lr-warmup-iters is --lr-decay-iters divided by `warmup_part`."""

    peak: float
    warmup_part: int

    def __str__(self) -> str:
        return f"--lr {self.peak:g} after a warm-up of 1/{self.warmup_part} of the steps"


NEW_WEIGHTS = LearningRate(3e-4, 100)
"""The peak is that of LLaMA 7B and 13B (arXiv 2302.13971, table 2), the warm-up that of Pythia (arXiv 2304.01373)."""
GIVEN_WEIGHTS = LearningRate(1e-5, 10)
"""As the scripts of ProLong train Llama 3 8B on texts of 64K tokens (arXiv 2410.02660); these take half of this peak
for 512K tokens, and twice the peak for chats."""
ADAPTERS = LearningRate(1e-4, 10)
"""As QLoRA trains its largest models, 33B and 65B; 7B and 13B get twice as much (arXiv 2305.14314, table 9)."""
PREFERENCES = LearningRate(5e-7, 10)
ADAPTERS_OF_PREFERENCES = LearningRate(5e-6, 10)
"""As in the DPO of Zephyr 7B, of all weights and with QLoRA (recipes/zephyr-7b-beta/dpo of
huggingface/alignment-handbook)."""
SAVE_INTERVAL_MINUTES = 30.0
"""Minutes of training that a killed run may lose. Writing a checkpoint of an 8B model, 90 GiB, takes 1.6 minutes at 1
GB/s."""


def world_size_from_env() -> int:
    """Ranks of this run as torchrun states them (WORLD_SIZE); 1 without a launcher."""
    return _from_env("WORLD_SIZE", 1, least=1)


def rank_from_env() -> int:
    """Rank of this process as torchrun states it (RANK); 0 without a launcher. Raises ConfigError for a rank that is
    not below the world size."""
    rank, world_size = _from_env("RANK", 0, least=0), world_size_from_env()
    require(rank < world_size, f"RANK is {rank} and WORLD_SIZE is {world_size}: ranks count from 0, so give them fewer")
    return rank


def local_world_size_from_env() -> int:
    """Ranks of this run on this node as torchrun states them (LOCAL_WORLD_SIZE); 1 without a launcher."""
    return _from_env("LOCAL_WORLD_SIZE", 1, least=1)


def _from_env(name: str, default: int, least: int) -> int:
    given = os.environ.get(name) or str(default)
    require(
        given.isdecimal() and int(given) >= least,
        f"{name} is {given} in the environment: a launcher sets it to a number from {least} on; unset it to run alone",
    )
    return int(given)


def global_batch_size(config: RunConfig, world_size: int) -> int:
    """Sequences in one optimizer step over all ranks."""
    one_microbatch_each = config.training.micro_batch_size * config.parallel.dp(world_size)
    is_odd_of_pairs = config.training.preference is not None and one_microbatch_each % 2
    return config.training.global_batch_size or one_microbatch_each * (2 if is_odd_of_pairs else 1)


def trains_adapters_alone(model: ModelConfig) -> bool:
    """Whether the model without its adapters stays as it is, so that it can be the reference of --preference."""
    return model.lora_rank > 0 and not model.train_only


def forwards_before_step(config: RunConfig) -> int:
    """Forwards of the global batch before a step with --preference, for log-probs under the model, and under the
    reference unless a file holds them."""
    if config.training.preference is None:
        return 0
    return 2 if config.data.reference_log_probs is None else 1


def num_microbatches(config: RunConfig, world_size: int) -> int:
    """Forward and backward passes of one model copy in one optimizer step."""
    one_microbatch_each = config.training.micro_batch_size * config.parallel.dp(world_size)
    return global_batch_size(config, world_size) // one_microbatch_each


def rank_length(config: RunConfig) -> int:
    """Tokens of one sequence on one context-parallel rank, before tp splits them."""
    return config.data.seq_length // config.parallel.cp


def rank_tokens(config: RunConfig) -> int:
    """Tokens of all sequences of a microbatch on one context-parallel rank, before tp splits them."""
    return rank_length(config) * config.training.micro_batch_size


def resolved_dtype(training: TrainingConfig, device: str) -> Dtype:
    """Dtype of weights and activations on a device type ("cpu" or "cuda")."""
    return training.params_dtype or ("bf16" if device == "cuda" else "fp32")


def resolved_memory_planner(memory: MemoryConfig, device: str) -> MemoryPlanner:
    """The memory planner on a device type ("cpu" or "cuda"). By default nothing is planned on a CPU."""
    return memory.memory_planner or ("auto" if device == "cuda" else "off")


def resolved_a2a_size(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Ranks of one Ulysses all-to-all group inside cp: 1 for rings, cp for pure all-to-all.

    a2a+p2p without --cp-a2a-size takes the largest divisor of cp that deals out the query heads
    and the key/value heads of one tp rank evenly.
    """
    if parallel.cp_comm_type == "a2a":
        return parallel.cp
    if parallel.cp_comm_type != "a2a+p2p":
        return 1
    return parallel.cp_a2a_size or max(
        size
        for size in range(1, parallel.cp + 1)
        if parallel.cp % size == 0
        and (model.num_attention_heads // parallel.tp) % size == 0
        and (model.kv_parts // parallel.tp) % size == 0
    )


def resolved_attention(config: RunConfig) -> str:
    """The kernels of attention in layers that are all of one kind. A GPU whose kernels are not chosen yet stands for
    one of compute capability 9.0."""
    hardware, capped = config.hardware, config.model.attn_logit_softcapping > 0
    backend: str = hardware.attention_backend
    if backend == "auto" and hardware.device != "cuda":
        backend = "torch" if capped else "cpu"
    elif backend == "auto":
        backend = backend_by_capability(90, hardware.deterministic, capped)
    return kernels_for(backend, config.model.head_dim)


def ring_size(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Ranks of one ring of cp."""
    return parallel.cp // resolved_a2a_size(model, parallel)


def resolved_vocab_size(model: ModelConfig, tokenizer_vocab_size: int | None = None) -> int:
    """--vocab-size, else the tokenizer's, else bytes."""
    return model.vocab_size or tokenizer_vocab_size or BYTE_VOCAB_SIZE


def vocab_rows_per_rank(vocab_size: int, tp: int) -> int:
    """Rows of the embedding and of the head on one tp rank, padding included.

    The same on every rank, and a multiple of 64 so that logits stay aligned for tensor cores.
    """
    return -(-vocab_size // (64 * tp)) * 64


def default_lr(config: RunConfig) -> LearningRate:
    """The default learning rate of a run, by what it trains (new weights, those of --pretrained-checkpoint or
    adapters), and on texts or on preferences."""
    has_weights = config.checkpoint.pretrained_checkpoint is not None
    return default_lr_of(config.model, has_weights, config.training.preference)


def default_lr_of(model: ModelConfig, has_weights: bool, preference: Preference | None = None) -> LearningRate:
    """The same of a model that starts from given weights or from new ones."""
    if preference is not None:
        return ADAPTERS_OF_PREFERENCES if model.lora_rank else PREFERENCES
    if model.lora_rank:
        return ADAPTERS
    return GIVEN_WEIGHTS if has_weights else NEW_WEIGHTS


def resolved_lr(config: RunConfig) -> float:
    """Peak learning rate."""
    given = config.training.lr
    return default_lr(config).peak if given is None else given


def resolved_lr_warmup_iters(config: RunConfig) -> int:
    """Steps of warm-up; the default is rounded down, and so is 0 for a short decay."""
    given = config.training.lr_warmup_iters
    return resolved_lr_decay_iters(config.training) // default_lr(config).warmup_part if given is None else given


def resolved_save_interval_minutes(config: RunConfig) -> float:
    """Minutes between two checkpoints; 0: do not save by time."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or checkpoint.save_interval_minutes is not None:
        return checkpoint.save_interval_minutes or 0.0
    return 0.0 if checkpoint.save_interval else SAVE_INTERVAL_MINUTES


def resolved_lr_decay_iters(training: TrainingConfig) -> int:
    """Step at which --min-lr is reached."""
    return training.lr_decay_iters or training.train_iters


def resolved_lr_wsd_decay_iters(training: TrainingConfig) -> int:
    """WSD: steps of the final decay; a tenth of the whole, at least one."""
    return training.lr_wsd_decay_iters or max(1, resolved_lr_decay_iters(training) // 10)


def sequence_step(tp: int, cp: int) -> int:
    """Tokens that must divide a sequence, or a tile of it: each cp rank has two pieces, which tp splits."""
    return tp if cp == 1 else 2 * cp * tp


def resolved_offload_tiles(config: RunConfig) -> int:
    """Tiles in which layers are computed under a swap plan.

    Unless layers are swept, there are fewer under --offload-alpha auto: without --offload-tiles as few as give experts
    EXPERT_ROWS, and in any case as few as divide the sequence.
    """
    memory = config.memory
    if memory.sweeps and memory.offload_tiles is None:
        in_slot = memory.offload_slot_tiles or SLOT_TILES
        return max(swept_tiles(config, SWEPT_TOKENS[0], in_slot), DEFAULT_TILES)
    tiles = memory.offload_tiles or DEFAULT_TILES
    if memory.offload_alpha != "auto" or memory.sweeps:
        return tiles
    if memory.offload_tiles is None and config.model.num_experts:
        tiles = min(tiles, config.data.seq_length // (config.parallel.cp * _expert_tile_tokens(config)))
    return _dividing(config, tiles)


def _dividing(config: RunConfig, most: int) -> int:
    """The largest number of tiles up to `most` into which the sequence divides, at least 1."""
    length, step = config.data.seq_length, sequence_step(config.parallel.tp, config.parallel.cp)
    return next((count for count in range(min(most, length // step), 1, -1) if length % (step * count) == 0), 1)


def layer_tiles(config: RunConfig) -> int:
    """Tiles in which the layers of a run are computed. Layers of all kinds have the same, so `config` has the whole
    model, not one kind of its layers."""
    return resolved_offload_tiles(config) if config.memory.swaps else resident_tiles(config)


def _expert_tile_tokens(config: RunConfig) -> int:
    """Tokens of each sequence of a rank that a tile needs to have EXPERT_ROWS rows for each expert; 0 without
    experts."""
    rows_of_tokens = config.model.moe_router_topk * config.training.micro_batch_size
    return math.ceil(EXPERT_ROWS * config.model.num_experts / rows_of_tokens)


def stays_under_autograd(config: RunConfig) -> bool:
    """Whether layers without a swap plan are left to autograd: custom layers, as memo knows their matrices alone,
    unless they keep nothing but their input."""
    return bool(config.model.custom_layer) and config.memory.recompute_granularity != "full"


def resident_tiles(config: RunConfig) -> int:
    """Tiles in which layers are computed without a swap plan: the most into which the sequence divides with at least
    RESIDENT_TILE_TOKENS tokens of a rank, and EXPERT_ROWS rows for each expert, in each; one tile under autograd.

    Where a swap plan would have a given number of tiles, whole layers have it too if nothing moves.
    """
    memory = config.memory
    if stays_under_autograd(config):
        return 1
    if memory.offload_tiles is not None and memory.offload_granularity == "layer":
        return _dividing(config, memory.offload_tiles)
    tokens = max(RESIDENT_TILE_TOKENS, _expert_tile_tokens(config))
    return _dividing(config, config.data.seq_length // (config.parallel.cp * tokens))


def swept_tiles(config: RunConfig, tokens: int, in_slot: int) -> int:
    """Tiles in slots of `in_slot`, each of `tokens` tokens of a rank or more: the largest number into which the
    sequence divides.

    0 where there are not two slots of them.
    """
    length, cp = config.data.seq_length, config.parallel.cp
    step = sequence_step(config.parallel.tp, cp) * in_slot
    most = length // (cp * in_slot * tokens)
    return in_slot * next((slots for slots in range(most, 1, -1) if length % (step * slots) == 0), 0)


def resolved_slot_tiles(config: RunConfig) -> int:
    """Tiles that a slot holds where layers are swept."""
    given, tiles = config.memory.offload_slot_tiles, resolved_offload_tiles(config)
    if given is not None:
        return given
    return next((count for count in range(SLOT_TILES, 1, -1) if tiles % count == 0 and tiles > count), 1)


def resolved_sections(config: RunConfig) -> int:
    """Sections, parts of the sequence of which a slot holds one; 1 where slots hold whole layers."""
    return resolved_offload_tiles(config) // resolved_slot_tiles(config) if config.memory.sweeps else 1
