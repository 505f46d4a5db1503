"""Rules about the shape of the model."""

from memo.artifacts.reading import shown
from memo.config.check_trained import check_trained
from memo.config.model import FULL, LINEAR, OF_SIGMOID, ROUTED, SCALING_READ_BY, SLIDING, ModelConfig
from memo.config.require import divisors, neighbours, require
from memo.config.run import RunConfig
from memo.config.unread import require_read, require_with
from memo.errors import ConfigError


def check_model(config: RunConfig) -> None:
    """Raises ConfigError."""
    _check_heads(config.model)
    _check_rope_scaling(config.model)
    _check_layer_types(config.model)
    _check_norms(config.model)
    _check_experts(config)
    check_trained(config)
    model = config.model
    pretrained = config.checkpoint.pretrained_checkpoint
    require(
        not model.custom_layer or pretrained is None,
        f"--custom-layer {model.custom_layer} fights with --pretrained-checkpoint {pretrained}, whose weights are "
        "those of memo's own layer: leave one of the two out",
    )
    for flag, is_on in (
        ("--attention-sinks", model.attention_sinks),
        ("--attention-output-gate", model.attention_output_gate),
    ):
        require(
            not model.custom_layer or not is_on,
            f"--custom-layer {model.custom_layer} fights with {flag}, which memo's own layer has: leave one of the two "
            "out",
        )
    if model.position_embedding_type == "learned_absolute" and model.max_position_embeddings is not None:
        require(
            config.data.seq_length <= model.max_position_embeddings,
            f"--seq-length {config.data.seq_length} is longer than the learned position table, "
            f"--max-position-embeddings {model.max_position_embeddings}: give --seq-length "
            f"{model.max_position_embeddings} or less, a larger table, or --position-embedding-type rope",
        )


def unscaled_length(config: RunConfig) -> str:
    """A sentence where sequences are longer than the model was made for, and nothing stretches its RoPE; else empty."""
    model, seq_length = config.model, config.data.seq_length
    made_for = model.max_position_embeddings
    if model.position_embedding_type != "rope" or model.rope_scaling_type != "none":
        return ""
    if made_for is None or seq_length <= made_for:
        return ""
    return (
        f"--seq-length {seq_length} is more than the {made_for} tokens that the model was made for "
        "(--max-position-embeddings), and nothing rescales its RoPE: give memo train --rope-scaling-type yarn "
        f"--rope-scaling-factor {seq_length / made_for:g} --rope-original-max-position-embeddings {made_for}, or "
        f"--max-position-embeddings {seq_length} if it shall learn longer positions as they are"
    )


def _check_heads(model: ModelConfig) -> None:
    heads, hidden = model.num_attention_heads, model.hidden_size
    if model.kv_channels is None:
        require(
            hidden % heads == 0,
            f"--hidden-size {hidden} does not divide into --num-attention-heads {heads}: use --hidden-size "
            f"{neighbours(hidden, heads)}, or state the size of a head with --kv-channels",
        )
    if model.position_embedding_type == "rope":
        source = (
            f"--hidden-size {hidden} / --num-attention-heads {heads}" if model.kv_channels is None else "--kv-channels"
        )
        require(
            model.head_dim % 2 == 0,
            f"RoPE turns pairs of channels, but {source} gives heads of {model.head_dim} channels, an odd "
            f"number: use an even --kv-channels such as {model.head_dim + 1}",
        )
        require(
            model.rotary_dim > 0 and model.rotary_dim % 2 == 0,
            f"RoPE turns pairs of channels, but --rotary-percent {model.rotary_percent} of heads of {model.head_dim} "
            f"are {model.rotary_dim} channels: give a share that makes an even number of them, such as 0.5",
        )
    require_read(
        model,
        "rotary_percent",
        model.position_embedding_type == "rope",
        f"--position-embedding-type {model.position_embedding_type}",
        "--position-embedding-type rope",
    )
    require(
        heads % model.kv_heads == 0,
        f"--num-attention-heads {heads} does not divide into --num-query-groups {model.kv_heads}: "
        f"use --num-query-groups {divisors(heads)}",
    )


def _check_layer_types(model: ModelConfig) -> None:
    types = model.layer_types
    require(
        not types or set(types.split(",")) <= {SLIDING, FULL, LINEAR},
        f"--layer-types is {shown(types)}: give {SLIDING}, {FULL} and {LINEAR} with commas, such as {SLIDING},{FULL}",
    )
    has_window = not types or SLIDING in types.split(",") or LINEAR not in types
    require(
        not types or not has_window or model.window_size > 0,
        f"--layer-types {types} fights with --window-size {model.window_size}: give the window of the layers that are "
        f"{SLIDING}, or leave --layer-types out",
    )

    require(
        has_window or model.window_size == 0,
        f"--window-size {model.window_size} fights with --layer-types {types}, where no layer is {SLIDING}: leave it "
        "out, or name the layers that have it",
    )
    require_with(model, "sliding_rotary_base", types, "--layer-types", f"{SLIDING},{FULL}")
    _check_linear(model)
    is_rope = model.position_embedding_type == "rope"
    use = "--position-embedding-type rope"
    require_read(
        model, "sliding_rotary_base", is_rope, f"--position-embedding-type {model.position_embedding_type}", use
    )


def _check_linear(model: ModelConfig) -> None:
    """Of layers that are gated delta nets."""
    types = model.layer_types.split(",")
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"):
        require_with(model, name, LINEAR in types, "--layer-types", f"{LINEAR},{FULL}")
    if LINEAR not in types:
        return
    require(
        set(types) != {LINEAR},
        f"--layer-types {model.layer_types} has no layer with attention: name at least one {FULL}, such as "
        f"{LINEAR},{LINEAR},{LINEAR},{FULL}",
    )
    require(
        keys > 0 and values > 0 and values % keys == 0,
        f"--linear-num-value-heads {values} does not divide into --linear-num-key-heads {keys}: each head of keys "
        "serves as many of values, such as 32 into 16",
    )
    for flag, is_on in (
        ("--add-bias-linear", model.add_bias_linear),
        ("--add-qkv-bias", model.add_qkv_bias),
        ("--custom-layer", model.custom_layer),
    ):
        require(not is_on, f"{flag} fights with --layer-types {model.layer_types}: memo has {LINEAR} layers without it")


def _check_norms(model: ModelConfig) -> None:
    require(
        not model.apply_layernorm_1p or model.normalization == "RMSNorm",
        f"--apply-layernorm-1p fights with --normalization {model.normalization}: use --normalization RMSNorm, or "
        "leave it out",
    )
    require(
        model.norm_placement == "before" or not model.num_experts,
        f"--norm-placement {model.norm_placement} fights with --num-experts {model.num_experts}: memo has norms of the "
        "outputs of one MLP for all tokens; leave one of the two out",
    )
    across = model.qk_layernorm_across_heads
    require_with(model, "qk_layernorm_across_heads", model.qk_layernorm, "--qk-layernorm", "as well")
    require(
        not across or model.normalization == "RMSNorm",
        f"--qk-layernorm-across-heads fights with --normalization {model.normalization}: use --normalization RMSNorm, "
        "or leave it out",
    )
    for name in ("norm_placement", "apply_layernorm_1p"):
        require_read(
            model, name, not model.custom_layer, f"--custom-layer {model.custom_layer}", "norms of the layer's own"
        )


def _check_experts(config: RunConfig) -> None:
    model = config.model
    experts, top_k = model.num_experts, model.moe_router_topk
    for name in ROUTED:
        require_read(model, name, experts, f"--num-experts {experts}", "--num-experts")
    has_shared = model.moe_shared_expert_intermediate_size
    use = "--moe-shared-expert-intermediate-size"
    require_read(model, "moe_shared_expert_gate", has_shared, f"{use} {has_shared}", use)
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        require_read(config.training, name, experts, f"--num-experts {experts}", "--num-experts")
    require(
        not experts or top_k <= experts,
        f"--moe-router-topk {top_k} is more than --num-experts {experts}: give {experts} or less",
    )
    _check_sigmoid(config)
    if model.moe_layer_freq:
        _check_layers_with_experts(model)
    require(
        not (experts and model.custom_layer),
        f"--custom-layer {model.custom_layer} fights with --num-experts {experts}, which is of memo's own layer: leave "
        "one of the two out",
    )


def _check_sigmoid(config: RunConfig) -> None:
    model, function = config.model, "--moe-router-score-function"
    experts, groups, of_groups = model.num_experts, model.moe_router_num_groups, model.moe_router_group_topk
    for name in OF_SIGMOID:
        is_read = model.moe_router_score_function == "sigmoid"
        require_read(model, name, is_read, f"{function} {model.moe_router_score_function}", f"{function} sigmoid")
    biased, switch = model.moe_router_enable_expert_bias, "--moe-router-enable-expert-bias"
    require_read(config.training, "moe_router_bias_update_rate", biased, f"a model without {switch}", switch)
    require(
        groups == 1 or (experts % groups == 0 and experts >= 2 * groups),
        f"--num-experts {experts} do not divide into --moe-router-num-groups {groups} of at least two experts: give a "
        f"divisor of {experts} that is no more than {experts // 2}",
    )
    require(
        of_groups <= groups,
        f"--moe-router-group-topk {of_groups} is more than --moe-router-num-groups {groups}: give {groups} or less",
    )
    require(
        groups == 1 or model.moe_router_topk <= of_groups * experts // groups,
        f"--moe-router-topk {model.moe_router_topk} is more than the {of_groups * experts // groups} experts of "
        f"--moe-router-group-topk {of_groups} groups: give as many or fewer, or more groups",
    )


def _check_layers_with_experts(model: ModelConfig) -> None:
    given, layers = model.moe_layer_freq, model.num_layers
    example = f"such as [0]*1+[1]*{layers - 1}"
    try:
        has_experts = model.layers_with_experts
    except ValueError:
        raise ConfigError(
            f"--moe-layer-freq is {shown(given)}, which is no sum of lists of 0 and 1: give 1 for each layer with "
            f"experts and 0 for each without, {example}"
        ) from None
    require(
        len(has_experts) == layers,
        f"--moe-layer-freq {given} is of {len(has_experts)} layers, and --num-layers is {layers}: give as many, "
        f"{example}",
    )
    require(
        any(has_experts),
        f"--moe-layer-freq {given} gives no layer any of the --num-experts {model.num_experts}: give at least one 1, "
        f"{example}, or leave both out",
    )


def _check_rope_scaling(model: ModelConfig) -> None:
    kind = model.rope_scaling_type
    require(
        kind == "none" or model.position_embedding_type == "rope",
        f"--rope-scaling-type {kind} fights with --position-embedding-type {model.position_embedding_type}, "
        f"which has no rotation to stretch: use --rope-scaling-type none or --position-embedding-type rope",
    )
    for name, readers in SCALING_READ_BY.items():
        use = f"--rope-scaling-type {' or '.join(readers)}"
        require_read(model, name, kind in readers, f"--rope-scaling-type {kind}", use)
    require(
        model.rope_low_freq_factor < model.rope_high_freq_factor,
        f"--rope-low-freq-factor {model.rope_low_freq_factor} is not below --rope-high-freq-factor "
        f"{model.rope_high_freq_factor}, so no wavelength lies between them: use 1 and 4",
    )
    require(
        model.rope_beta_slow < model.rope_beta_fast,
        f"--rope-beta-slow {model.rope_beta_slow} is not below --rope-beta-fast {model.rope_beta_fast}, "
        f"so no dimension lies between them: use 1 and 32",
    )
