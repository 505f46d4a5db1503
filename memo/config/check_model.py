"""Rules about the shape of the model, and about which of its parameters are trained."""

from memo.config.check_fields import Condition, Conflict, check_conditions, check_conflicts, check_fields
from memo.config.layer_words import FULL, LINEAR, SLIDING, numbers_of
from memo.config.model import ModelConfig
from memo.config.require import divisors, neighbours, require, require_divides
from memo.config.run import RunConfig

_OWN = "that is for memo's own layer"
_OF_GEMMA_4 = ("around", "RMSNorm")
_LATENT = "memo has multi-latent attention without it"
_CONFLICTS: tuple[Conflict, ...] = (
    ("custom_layer", ("pretrained_checkpoint", "quantize", "lora_rank", "num_experts", "norm_placement"), _OWN),
    ("custom_layer", ("apply_layernorm_1p", "attention_sinks", "attention_output_gate"), _OWN),
    ("custom_layer", ("attn_logit_softcapping", "layer_scalar", "v_layernorm"), _OWN),
    ("custom_layer", ("full_num_query_groups", "full_kv_channels"), _OWN),
    ("multi_latent_attention", ("kv_channels", "rotary_percent", "qk_layernorm", "attention_output_gate"), _LATENT),
    ("multi_latent_attention", ("add_bias_linear", "add_qkv_bias", "custom_layer"), _LATENT),
    ("multi_latent_attention", ("attention_sinks", "full_num_query_groups", "full_kv_channels"), _LATENT),
    ("freeze", ("train_only",), "each says what is trained"),
    ("freeze", ("lora_rank",), "LoRA freezes the whole model, and --train-only says what is trained beside it"),
)


def _words(model: ModelConfig) -> list[str]:
    return model.layer_types.split(",")


def _has_even_groups(model: ModelConfig) -> bool:
    experts, groups = model.num_experts, model.moe_router_num_groups
    return groups == 1 or (experts % groups == 0 and experts >= 2 * groups)


def _has_enough_in_groups(m: ModelConfig) -> bool:
    groups = m.moe_router_num_groups
    return groups == 1 or m.moe_router_topk * groups <= m.moe_router_group_topk * m.num_experts


def _has_delta_heads(model: ModelConfig) -> bool:
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    return LINEAR not in _words(model) or (keys > 0 and values > 0 and values % keys == 0)


def _has_positions(config: RunConfig) -> bool:
    """Whether a learned table has a row for each position of a sequence."""
    learned, length = config.model.position_embedding_type == "learned_absolute", config.data.seq_length
    return not learned or length <= (config.model.max_position_embeddings or length)


_CONDITIONS: tuple[Condition, ...] = (
    (
        lambda c: c.model.rope_low_freq_factor < c.model.rope_high_freq_factor,
        "{rope_low_freq_factor} is not below {rope_high_freq_factor}, so no wavelength lies between them: use 1 and 4",
    ),
    (
        lambda c: c.model.rope_beta_slow < c.model.rope_beta_fast,
        "{rope_beta_slow} is not below {rope_beta_fast}, so no dimension lies between them: use 1 and 32",
    ),
    (
        lambda c: not c.model.layer_types or (SLIDING in _words(c.model)) == (c.model.window_size > 0),
        f"{{layer_types}} conflicts with {{window_size}}, which is of layers that are {SLIDING}: give both, or neither",
    ),
    (
        lambda c: not c.model.multi_latent_attention or c.model.kv_heads == c.model.num_attention_heads,
        "{num_query_groups} conflicts with {multi_latent_attention}, which makes keys and values of each of "
        "{num_attention_heads}: leave it out",
    ),
    (
        lambda c: c.model.v_layernorm or not c.model.full_keys_as_values,
        "{full_keys_as_values} conflicts with {v_layernorm}: values that are keys have norms, so give --v-layernorm",
    ),
    (
        lambda c: not c.model.multi_latent_attention or LINEAR not in _words(c.model),
        f"{{layer_types}} conflicts with {{multi_latent_attention}}: memo has {LINEAR} layers without it",
    ),
    (
        lambda c: not c.model.multi_latent_attention or c.model.qk_pos_emb_head_dim % 2 == 0,
        "{qk_pos_emb_head_dim} is odd, but RoPE turns pairs of channels: give an even number, such as 64",
    ),
    (
        lambda c: not c.model.multi_latent_attention or c.model.v_head_dim <= c.model.head_dim,
        "{v_head_dim} is more than {qk_head_dim} and {qk_pos_emb_head_dim} together, the channels of a query: give as "
        "many or fewer",
    ),
    (
        lambda c: {*_words(c.model)} != {LINEAR},
        f"{{layer_types}} has no layer with attention: name at least one {FULL}, such as {LINEAR},{FULL}",
    ),
    (
        lambda c: LINEAR not in _words(c.model) or not (c.model.qkv_bias or c.model.custom_layer),
        f"--add-bias-linear, --add-qkv-bias and --custom-layer conflict with {{layer_types}}: memo has {LINEAR} layers "
        "without them",
    ),
    (
        lambda c: _has_delta_heads(c.model),
        "{linear_num_value_heads} does not divide by {linear_num_key_heads}: each head of keys serves as many of "
        "values, such as 32 for 16",
    ),
    (
        lambda c: c.model.norm_placement == "before" or not c.model.num_experts or c.model.moe_separate_norms,
        "{norm_placement} conflicts with {num_experts}: memo has norms of the output of one MLP for all tokens, or, "
        "with --norm-placement around --moe-separate-norms, of shared experts and others",
    ),
    (
        lambda c: not c.model.moe_separate_norms or (c.model.norm_placement, c.model.normalization) == _OF_GEMMA_4,
        "{moe_separate_norms} conflicts with {norm_placement} or {normalization}: give --norm-placement around and "
        "--normalization RMSNorm, or leave it out",
    ),
    (
        lambda c: not c.model.num_experts or c.model.moe_router_topk <= c.model.num_experts,
        "{moe_router_topk} is above {num_experts}: give as many or fewer",
    ),
    (
        lambda c: _has_even_groups(c.model),
        "{num_experts} does not divide by {moe_router_num_groups} into groups of at least two experts: give a divisor "
        "of it, no more than its half",
    ),
    (
        lambda c: c.model.moe_router_group_topk <= c.model.moe_router_num_groups,
        "{moe_router_group_topk} is above {moe_router_num_groups}: give as many or fewer",
    ),
    (
        lambda c: _has_enough_in_groups(c.model),
        "{moe_router_topk} is more than {moe_router_group_topk} of {moe_router_num_groups} groups hold of "
        "{num_experts}: give fewer, or more groups",
    ),
    (
        lambda c: len(c.model.layers_with_experts) == c.model.num_layers,
        "{moe_layer_freq} does not have one number for each of {num_layers}: give as many, such as [0]*1+[1]*3 for 4",
    ),
    (
        lambda c: len(c.model.layers_without_rope) == c.model.num_layers,
        "{no_rope_freq} does not have one number for each of {num_layers}: give as many, such as [0,0,0,1]*9 for 36",
    ),
    (
        lambda c: not all(c.model.layers_without_rope),
        "{no_rope_freq} leaves no layer with RoPE: give at least one 0, or --position-embedding-type none",
    ),
    (
        lambda c: not c.model.num_experts or any(c.model.layers_with_experts),
        "{moe_layer_freq} gives no layer any of {num_experts}: give at least one 1, or leave both out",
    ),
    (
        lambda c: c.model.quantize == "none" or c.model.lora_rank or c.model.freeze or c.model.train_only,
        "{quantize} is of frozen matrices, and everything is trained: give --lora-rank 16, --freeze or --train-only",
    ),
    (
        lambda c: _has_positions(c) or c.checkpoint.pretrained_checkpoint,
        "{seq_length} is longer than the learned position table, {max_position_embeddings}: give as many tokens or "
        "fewer, a larger table, or --position-embedding-type rope",
    ),
    (
        _has_positions,
        "{seq_length} is longer than the learned position table of {pretrained_checkpoint}, "
        "{max_position_embeddings}, which nothing stretches: give as many tokens or fewer, or another model",
    ),
)


def check_model(config: RunConfig) -> None:
    """Raises ConfigError. Whether the patterns of --freeze and --train-only name any parameter is checked by
    memo.spec.parameters."""
    check_fields(config, "model")
    _check_heads(config.model, "num-query-groups", "kv-channels")
    _check_heads(config.model.of_full_layers, "full-num-query-groups", "full-kv-channels")
    check_conflicts(config, _CONFLICTS)
    check_conditions(config, _CONDITIONS)
    if config.model.rope_scaling_type == "longrope":
        _check_factors(config.model)


def _check_heads(model: ModelConfig, flag_of_groups: str, flag_of_size: str) -> None:
    heads, hidden, size = model.num_attention_heads, model.hidden_size, model.head_dim
    if model.kv_channels is None and not model.multi_latent_attention:
        use = f"--hidden-size {neighbours(hidden, heads)}, or state the size of a head with --kv-channels"
        require_divides("--hidden-size", hidden, f"--num-attention-heads {heads}", heads, use)
    if model.position_embedding_type == "rope" and not model.multi_latent_attention:
        source = f"--{flag_of_size}" if model.kv_channels else f"--hidden-size {hidden} / --num-attention-heads {heads}"
        require(
            size % 2 == 0,
            f"RoPE turns pairs of channels, but {source} gives heads of {size} channels, an odd number: use an even "
            f"--{flag_of_size} such as {size + 1}",
        )
        require(
            model.rotary_dim > 0 and model.rotary_dim % 2 == 0,
            f"RoPE turns pairs of channels, but --rotary-percent {model.rotary_percent} of heads of {size} are "
            f"{model.rotary_dim} channels: give a share that makes an even number of them, such as 0.5",
        )
    use = f"--{flag_of_groups} {divisors(heads)}"
    require_divides("--num-attention-heads", heads, f"--{flag_of_groups} {model.kv_heads}", model.kv_heads, use)


def _check_factors(model: ModelConfig) -> None:
    pairs = model.rotary_dim // 2
    for flag, factors in (
        ("--rope-short-factor", model.rope_short_factor),
        ("--rope-long-factor", model.rope_long_factor),
    ):
        count = len(numbers_of(factors)) if factors else 0
        require(
            count == pairs,
            f"{flag} has {count} numbers, but RoPE turns {pairs} pairs of channels of a head: give one for each, as "
            "in the model's config.json",
        )


def unscaled_length(model: ModelConfig, seq_length: int) -> str:
    """A warning if sequences are longer than the model was made for, or than its RoPE is stretched for; else an empty
    text."""
    made_for, scaling = model.max_position_embeddings, model.rope_scaling_type
    if model.position_embedding_type != "rope" or made_for is None or seq_length <= made_for:
        return ""
    if scaling not in ("none", "proportional"):
        original, factor = model.rope_original_max_position_embeddings, model.rope_scaling_factor
        if scaling == "linear" or seq_length <= original * factor:
            return ""  # linear does not say from which length
        return (
            f"--seq-length {seq_length} is more than the {made_for} tokens that the model was made for "
            f"(--max-position-embeddings), and its RoPE is stretched from {original} tokens by "
            f"--rope-scaling-type {scaling} --rope-scaling-factor {factor:g}: to train it, give memo extend --method "
            f"yarn, which stretches it anew, or --max-position-embeddings {seq_length} if it shall learn longer "
            "positions as they are; to use it as it is, give fewer tokens"
        )
    yarn = (
        f"--rope-scaling-type yarn --rope-scaling-factor {seq_length / made_for:g} "
        f"--rope-original-max-position-embeddings {made_for}"
    )
    return (
        f"--seq-length {seq_length} is more than the {made_for} tokens that the model was made for "
        "(--max-position-embeddings), and nothing rescales its RoPE: to train it, give "
        f"{yarn if scaling == 'none' else 'memo extend --method rope-base'}, or "
        f"--max-position-embeddings {seq_length} if it shall learn longer positions as they are; to use it as it is, "
        "give fewer tokens"
    )
