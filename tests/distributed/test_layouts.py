"""Every layout trains like one process: losses, gradients of the first step, weights after two steps.

All runs are in fp64. Bounds: gradients and losses 1e-12 of the largest value (a few hundred roundings of 1e-16);
weights 1e-9, because Adam divides by the root of the second moment, which magnifies the rounding of a
gradient that is itself nearly zero.
"""

import functools

import pytest
from custom_layers import PARALLEL, SANDWICH
from layouts import Outcome, relative_error, tiny, train

from memo.config import RunConfig

GRADIENT_BOUND = LOSS_BOUND = 1e-12
WEIGHT_BOUND = 1e-9
BF16_LOSS_BOUND = 5e-5
"""Relative, of one process and of any layout. A token's loss is off by up to 2^-9, their mean by 1.2e-5 (measured)."""
STEPS = 2
"""The loss of the second step shows the weights of the first; its weights show the moments."""

GPT, LLAMA, QWEN, GPT2 = "gpt-tiny", "llama-tiny", "qwen3-tiny", "gpt2-tiny"
EXPERTS, OSS, DELTA = "qwen3-moe-tiny", "gpt-oss-tiny", "qwen3.5-tiny"
SOME_EXPERTS = "qwen3-moe-tiny, the first layer without experts"
GLM, LATENT, GEMMA = "glm-4.5-tiny", "deepseek-tiny", "gemma-4-moe-tiny"
DELTA_EXPERTS = "qwen3.5-tiny, with experts"
ADAPTED = "qwen3-tiny, with LongRoPE and adapters of LoRA"
CODED = "llama-tiny, with adapters beside a model in 4 bits"
FROZEN = "gpt2-tiny, its tables and every second layer frozen"
OLMO = "olmo-3-tiny, norms across heads"
CUSTOM, SANDWICHED = "a layer that is not in memo", "another one, with norms around its branches"
CUSTOM_LAYERS = {CUSTOM: PARALLEL, SANDWICHED: SANDWICH}
KINDS = "llama-tiny, layers with a window and layers without RoPE, all with sinks"

SWEPT = {"offload_alpha": 0.5, "offload_granularity": "tile", "offload_tiles": 4, "offload_slot_tiles": 1}
Layout = tuple[str, int, dict[str, object]]
# Every axis, every pair of two, and three together; every kind of model in one of them.
LAYOUTS: list[Layout] = [
    # one axis
    *((model, 2, {"tp": 2}) for model in (ADAPTED, SANDWICHED, GLM)),
    (DELTA, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (GLM, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (KINDS, 2, {"cp": 2, "cp_comm_type": "all_gather"}),
    (LLAMA, 2, {"cp": 2, "cp_comm_type": "a2a"}),
    (KINDS, 4, {"cp": 4, "cp_comm_type": "a2a+p2p"}),
    (GPT, 2, {"pp": 2, "vpp": 2}),
    (FROZEN, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    *((CODED, 2, {axis: 2}) for axis in ("tp", "pp")),
    (CODED, 2, {"data_parallel_sharding_strategy": "optim_grads_params", "offload_states": "all"}),
    # pairs
    (FROZEN, 4, {"tp": 2, "pp": 2}),
    (FROZEN, 4, {"pp": 4}),  # two stages train nothing
    (DELTA, 4, {"pp": 4, **SWEPT}),  # three stages have no keys and values
    *((model, 4, {"tp": 2, "pp": 2}) for model in (OLMO, GEMMA)),
    (OSS, 4, {"tp": 2, "cp": 2}),
    (LATENT, 4, {"tp": 2, "cp": 2, "cp_comm_type": "all_gather"}),
    (SOME_EXPERTS, 4, {"tp": 2, "pp": 2}),
    (DELTA, 4, {"cp": 2, "pp": 2, "cp_comm_type": "a2a"}),
    (DELTA_EXPERTS, 4, {"tp": 2, "cp": 2, "cp_comm_type": "a2a"}),
    (GPT2, 4, {"tp": 2}),
    (QWEN, 4, {"cp": 2, "cp_comm_type": "all_gather"}),
    # all together
    (KINDS, 8, {"tp": 2, "cp": 2, "pp": 2}),
]
# Axes of four ranks; pairs again, with what one axis shows alone (exchanges of cp, chunks of a stage), and three axes
# with a fourth; kinds of models again.
MORE_LAYOUTS: list[Layout] = [
    *((model, 2, {"tp": 2}) for model in (GPT2, QWEN, CUSTOM)),
    (ADAPTED, 2, {"pp": 2}),
    (ADAPTED, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (OLMO, 2, {"cp": 2, "cp_comm_type": "all_gather"}),
    (OLMO, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (CUSTOM, 2, {"pp": 2}),
    (GPT, 4, {"tp": 2, "pp": 2}),
    (KINDS, 4, {"cp": 2, "pp": 2}),
    (GPT, 4, {"tp": 4}),
    (LLAMA, 4, {"pp": 4}),
    (GPT, 4, {"micro_batch_size": 1}),
    (GPT2, 4, {"cp": 4, "cp_comm_type": "p2p"}),
    (KINDS, 4, {"cp": 4, "cp_comm_type": "p2p"}),  # of the four steps of its ring one has no scores
    (LLAMA, 4, {"tp": 2, "cp": 2, "cp_comm_type": "all_gather"}),
    (GPT, 4, {"tp": 2, "cp": 2, "cp_comm_type": "a2a"}),
    (DELTA, 4, {"tp": 2, "cp": 2, "cp_comm_type": "a2a"}),
    (LLAMA, 4, {"tp": 2, "pp": 2, "vpp": 2}),
    (GPT, 4, {"cp": 2, "pp": 2, "vpp": 2, "cp_comm_type": "a2a"}),
    (GPT2, 4, {"pp": 2, "vpp": 2, "global_batch_size": 4}),
    (GPT, 8, {"tp": 2, "cp": 2, "pp": 2, "vpp": 2, "cp_comm_type": "a2a"}),
    (GPT2, 8, {"tp": 2, "pp": 2}),
    (QWEN, 8, {"tp": 2, "cp": 2, "micro_batch_size": 2}),
    *((EXPERTS, 2, {"cp": 2, "cp_comm_type": kind}) for kind in ("p2p", "all_gather", "a2a")),
    (EXPERTS, 4, {"pp": 2, "micro_batch_size": 2}),
    (EXPERTS, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    *((GLM, 2, {axis: 2}) for axis in ("cp", "pp")),
    *((LATENT, 2, {axis: 2}) for axis in ("tp", "pp")),
    *((LATENT, 2, {"cp": 2, "cp_comm_type": kind}) for kind in ("p2p", "a2a")),
    (LATENT, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (LATENT, 4, {"cp": 4, "cp_comm_type": "a2a+p2p"}),
    *((model, 4, {"tp": 2, "cp": 2}) for model in (ADAPTED, LLAMA, CUSTOM, GLM, GEMMA)),
    *((GEMMA, 2, {"cp": 2, "cp_comm_type": kind}) for kind in ("p2p", "all_gather", "a2a")),
    (GEMMA, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (OLMO, 4, {"tp": 2, "cp": 2, "cp_comm_type": "p2p"}),
    (OLMO, 2, {"cp": 2, "cp_comm_type": "a2a"}),
    (CUSTOM, 2, {"offload_states": "optimizer"}),
    (CUSTOM, 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (CUSTOM, 8, {"tp": 2, "cp": 2, "pp": 2}),
    (SANDWICHED, 4, {"tp": 2, "cp": 2}),
]


def config_of(model: str, **layout: object) -> RunConfig:
    if model == KINDS:
        kinds = {"window_size": 7, "layer_types": "sliding,full", "attention_sinks": True}
        kinds |= {"attention_output_gate": True, "no_rope_freq": "[0,1]*2", "rope_scaling_type": "yarn"}
        kinds |= {"rope_original_max_position_embeddings": 8, "rope_llama_4_scaling_beta": 0.3}
        return tiny(LLAMA, num_layers=4, **kinds, **layout)
    if model == SOME_EXPERTS:
        dense_first = {"moe_layer_freq": "[0]+[1]*3", "ffn_hidden_size": 96, "moe_ffn_hidden_size": 32}
        dense_first |= {
            "moe_shared_expert_intermediate_size": 48,
            "moe_shared_expert_gate": True,
            "rotary_percent": 0.5,
        }
        return tiny(EXPERTS, num_layers=4, **dense_first, **layout)
    if model == DELTA_EXPERTS:
        experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "num_query_groups": 4}
        experts |= {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True}
        return tiny(DELTA, num_layers=4, **experts, **layout)
    if model == ADAPTED:
        # A rank of cp 2 has 32 tokens, no more than the original length; the sequence has 64.
        rope = {"rope_scaling_type": "longrope", "rope_original_max_position_embeddings": 32}
        rope |= {"rope_scaling_factor": 2.0, "rope_short_factor": "1,1,1,1", "rope_long_factor": "1,2,4,9"}
        return tiny(QWEN, num_layers=4, lora_rank=3, lora_alpha=5.0, **rope, **layout)
    if model == OLMO:
        return tiny("olmo-3-tiny", num_layers=4, window_size=11, **layout)
    if model in CUSTOM_LAYERS:
        return tiny(LLAMA, num_layers=2, custom_layer=CUSTOM_LAYERS[model], **layout)
    if model == CODED:
        wide = {"hidden_size": 128, "kv_channels": 32, "ffn_hidden_size": 128, "lora_rank": 3, "quantize": "nf4"}
        return tiny(LLAMA, num_layers=4, **wide, **layout)
    if model == GEMMA:  # behind so many norms larger steps would amplify rounding
        return tiny(GEMMA, num_layers=4, lr=1e-3, **layout)
    if model == FROZEN:
        return tiny(GPT2, num_layers=4, freeze="*embedding.weight,layers.[02].*", **layout)
    return tiny(model, num_layers=4, **({"num_query_groups": 4} if model == DELTA else {}), **layout)


@functools.cache
def one_process(model: str, dtype: str = "fp64", steps: int = STEPS, global_batch_size: int = 4) -> Outcome:
    return train(config_of(model, dtype=dtype, global_batch_size=global_batch_size), steps=steps)


@pytest.mark.parametrize(
    ("model", "world_size", "layout"),
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.full) for layout in MORE_LAYOUTS)],
    ids=str,
)
def test_layout_equals_one_process(model: str, world_size: int, layout: dict[str, object]) -> None:
    """Four samples where they fill a pipeline or the ranks of dp; elsewhere two, which are accumulated."""
    is_filled = layout.get("tp", 1) * layout.get("cp", 1) < world_size  # type: ignore[operator]
    batch = 4 if is_filled else 2
    expected = one_process(model, global_batch_size=batch)
    actual = train(config_of(model, **{"global_batch_size": batch, **layout}), world_size, STEPS)
    for got, wanted in zip(actual.losses, expected.losses, strict=True):
        assert abs(got - wanted) <= LOSS_BOUND * abs(wanted)
    assert relative_error(actual.gradients, expected.gradients) <= GRADIENT_BOUND
    assert relative_error(actual.weights, expected.weights) <= WEIGHT_BOUND
    for got, wanted in zip(actual.norms, expected.norms, strict=True):
        assert abs(got - wanted) <= WEIGHT_BOUND * wanted


def test_training_changes_every_weight() -> None:
    """The comparison above would pass on weights that never move."""
    start, end = train(config_of(GPT2), steps=0).weights, one_process(GPT2).weights
    for name in start:
        assert not start[name].equal(end[name]), name


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {}], ids=str)
def test_bf16_layouts_stay_within_bf16_of_fp64(layout: dict[str, object]) -> None:
    """bf16 has 8 bits: gradients of a sharded run may be at most twice as far from fp64 as those of one process are."""
    exact, alone = one_process(LLAMA, "fp64", 1), one_process(LLAMA, "bf16", 1)
    spread = train(config_of(LLAMA, dtype="bf16", **layout), 2, steps=1)

    def error(outcome: Outcome) -> float:
        return relative_error({n: g.double() for n, g in outcome.gradients.items()}, exact.gradients)

    assert error(spread) <= 2 * error(alone)
    for outcome in (alone, spread):
        assert abs(outcome.losses[0] - exact.losses[0]) <= BF16_LOSS_BOUND * exact.losses[0]
