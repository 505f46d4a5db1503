"""config.json of Hugging Face: published files give the presets, and what would change the mathematics is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden import GOLDEN
from hf_directories import ALONE

from memo.config import PRESETS, ModelConfig, RunConfig
from memo.config.checks import check
from memo.config.flags import parse_run
from memo.config.hugging_face import HuggingFaceModel, model_of, read_config
from memo.config.hugging_face_counted import COUNTED
from memo.config.hugging_face_families import FAMILIES, TRAINED
from memo.config.hugging_face_rope import write_rope
from memo.config.model_name import choose_model
from memo.config.to_hugging_face import write_config
from memo.errors import ConfigError
from memo.spec.stack import kinds_of

PUBLISHED = {path.stem: json.loads(path.read_text()) for path in sorted((GOLDEN / "published_configs").glob("*.json"))}
"""By preset: the config.json that its makers published, as far as it decides the mathematics."""
LLAMA_31_8B, QWEN3_8B, GEMMA_3_1B = PUBLISHED["llama-3.1-8b"], PUBLISHED["qwen3-8b"], PUBLISHED["gemma-3-1b"]
GEMMA_3_4B, GLM_45_AIR, OLMO_3_7B = PUBLISHED["gemma-3-4b"], PUBLISHED["glm-4.5-air"], PUBLISHED["olmo-3-7b"]
QWEN25_7B, QWEN35_27B = PUBLISHED["qwen2.5-7b"], PUBLISHED["qwen3.5-27b"]
WINDOWED: dict[str, Any] = {"sliding_window": 4096, "use_sliding_window": True}
MISTRAL: dict[str, Any] = {**LLAMA_31_8B, "model_type": "mistral", "rope_scaling": None, "sliding_window": None}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True}},
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {"type": "longrope", "long_factor": [1.0, 4.0], "short_factor": [1.0, 1.0]}


def write(directory: Path, content: object) -> Path:
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_presets(name: str, tmp_path: Path) -> None:
    assert read_config(write(tmp_path, PUBLISHED[name])).model == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_round_trip(name: str) -> None:
    model = replace(PRESETS[name], vocab_size=PRESETS[name].vocab_size or 61)
    num_positions = model.max_position_embeddings or 512
    written = write_config(model, num_positions, "bfloat16")
    back = model_of(json.loads(json.dumps(written.content)), "config.json")
    sizes = {"num_query_groups": model.kv_heads, "kv_channels": model.head_dim, "ffn_hidden_size": model.ffn_size}
    if written.model_type == "gpt2":
        del sizes["num_query_groups"]
    if written.model_type == "gpt2" or model.multi_latent_attention:
        del sizes["kv_channels"]
    assert back == replace(model, max_position_embeddings=num_positions, **sizes)  # type: ignore[arg-type]
    assert written.content["torch_dtype"] == "bfloat16"


def test_a_file_may_say_among_rotations_which_part_of_a_head_is_rotated() -> None:
    """It then says so to transformers, whatever stands beside it; and layers that are left out are not promised."""
    joined = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    model = model_of({**GLM_45_AIR, "rope_parameters": joined}, "x")
    assert model == replace(PRESETS["glm-4.5-air"], rotary_percent=0.25)
    yarn = {**GLM_45_AIR, "rope_scaling": {**YARN, "partial_rotary_factor": 0.75}}
    assert model_of(yarn, "x").rotary_percent == 0.75
    absent = {key: value for key, value in GLM_45_AIR.items() if key != "partial_rotary_factor"}
    assert model_of(absent, "x") == PRESETS["glm-4.5-air"]
    written = write_config(model, 131072, None, HuggingFaceModel(model, "glm4_moe", {**GLM_45_AIR, **joined}))
    assert written.content["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": "[0,1]*23"}, r"moe_layer_freq must be \[0\]\*23\+\[1\]\*23, not \[0,1\]\*23"),
        (
            {"moe_shared_expert_intermediate_size": 1000},
            "moe_shared_expert_intermediate_size must be 0, not 1000",
        ),
        ({"moe_router_score_function": "softmax"}, "moe_router_score_function must be sigmoid, not softmax"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias must be True, not False"),
    ],
)
def test_no_family_has_such_routers_or_layers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"Glm4MoeForCausalLM is the nearest, but {message}"):
        write_config(replace(PRESETS["glm-4.5-air"], **changes), 131072, None)


def test_layers_with_a_window_rotate_by_the_base_of_all_and_are_not_stretched() -> None:
    """OLMo 3 says so by its class; files of transformers from 5.0 on have the newer key, and those of memo both, which
    may not differ."""
    model = model_of(OLMO_3_7B, "x")
    sliding, full = kinds_of(model)
    assert (sliding.rotation, full.rotation) == ((5e5, "none", 128), (5e5, "yarn", 128))
    written = write_config(replace(model, rotary_base=3e6, sliding_rotary_base=2e6), 65536, None).content
    newer = {key: value for key, value in written.items() if key not in ("rope_scaling", "rope_theta")}
    for content in (written, newer):
        assert [kind.rotary_base for kind in kinds_of(model_of(content, "x"))] == [2e6, 3e6]
    with pytest.raises(ConfigError, match=r"rope_parameters is .* and rope_scaling"):
        model_of({**written, "rope_scaling": {**written["rope_scaling"], "factor": 4.0}}, "x")


SMOLLM_3: dict[str, Any] = {**LLAMA_31_8B, "model_type": "smollm3", "num_hidden_layers": 10, "rope_scaling": None}
EXAONE_4: dict[str, Any] = {**LLAMA_31_8B, "model_type": "exaone4", "num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (SMOLLM_3, "[0,0,0,1]*2+[0,0]"),
        ({**SMOLLM_3, "no_rope_layer_interval": 5}, "[0,0,0,0,1]*2"),
        ({**SMOLLM_3, "no_rope_layers": [1, 1, 1, 0] * 3}, "[0,0,0,1]*2+[0,0]"),
        ({**SMOLLM_3, "no_rope_layers": [1] * 10}, ""),
        (EXAONE_4, "[0,0,0,1]*2"),
        ({**EXAONE_4, "layer_types": ["full_attention", *["sliding_attention"] * 7]}, "[1,0,0,0,0,0,0,0]*1"),
        ({**EXAONE_4, "sliding_window": LLAMA_31_8B["max_position_embeddings"]}, "[0,0,0,1]*2"),
        ({**EXAONE_4, "sliding_window": None}, ""),
    ],
)
def test_some_layers_have_no_rope(content: dict[str, Any], expected: str) -> None:
    """A file says which, or in EXAONE 4 those without the window, however long it is; a written file says so again."""
    model = model_of(content, "x")
    assert model.no_rope_freq == expected
    assert write_config(replace(model, norm_epsilon=1e-4), 4096, None).model.no_rope_freq == expected


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("name", ["olmo-3-tiny", "gemma-3-tiny", "gpt-oss-tiny"])
def test_layers_that_are_all_alike_are_written_as_such(name: str, window: int) -> None:
    """In families whose files mean several kinds where they say nothing."""
    alike = {"layer_types": "", "sliding_rotary_base": 0.0, "rope_scaling_type": "none", "rope_truncate": True}
    model = replace(PRESETS[name], vocab_size=61, window_size=window, **alike)
    written = write_config(model, 512, None)
    assert len(kinds_of(written.model)) == 1
    assert (written.model.window_size, written.model.rotation) == (window, model.rotation)
    assert written.content.get("sliding_window", written.model_type == "olmo2")  # asked for where no layer has it, too


_FULL_AND_SLIDING = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
}


def test_layers_with_a_window_may_rotate_in_their_own_way() -> None:
    """The newer way of a file to say so, and the older one; where all layers are alike they rotate as their kind."""
    model = model_of({**GEMMA_3_1B, "rope_parameters": _FULL_AND_SLIDING}, "x")
    assert (model.rotary_base, model.rope_scaling_type, model.sliding_rotary_base) == (5e5, "linear", 3e3)
    sliding, full = kinds_of(model)
    assert (sliding.rotation, full.rotation) == ((3e3, "none", 256), (5e5, "linear", 256))
    older = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 3e3}
    assert model_of({**GEMMA_3_1B, **older}, "x") == model == model_of(write_config(model, 32768, None).content, "x")
    alike = {kind: model_of({**GEMMA_3_1B, **older, "layer_types": [kind] * 26}, "x") for kind in _FULL_AND_SLIDING}
    assert [kinds_of(each)[0].rotation for each in alike.values()] == [full.rotation, sliding.rotation]
    for each in (model, *alike.values()):
        check(RunConfig(model=each).override({"mock_data": True}), 1)
    patterned = model_of({**GEMMA_3_1B, "sliding_window_pattern": 2}, "x")
    assert patterned.layer_types == "sliding,full"


def test_yarn_and_linear_scaling() -> None:
    yarn = model_of({**QWEN3_8B, "rope_scaling": YARN}, "x")
    assert (yarn.rope_scaling_type, yarn.rope_scaling_factor) == ("yarn", 4.0)
    assert yarn.rope_original_max_position_embeddings == 32768
    implied = {key: value for key, value in YARN.items() if not key.startswith("original")}
    assert model_of({**QWEN3_8B, "rope_scaling": implied}, "x").rope_original_max_position_embeddings == 40960
    linear = model_of({**QWEN3_8B, "rope_scaling": {"rope_type": "linear", "factor": 2}}, "x")
    assert (linear.rope_scaling_type, linear.rope_scaling_factor) == ("linear", 2.0)
    for model in (yarn, linear, model_of(LLAMA_31_8B, "x")):  # no leftovers that the checks refuse
        check(RunConfig(model=model).override({"mock_data": True}), 1)


@pytest.mark.parametrize(
    "content",
    [
        {**QWEN3_8B, "sliding_window": 4096, "use_sliding_window": False},
        {**MISTRAL, "sliding_window": 131072},
        {**LLAMA_31_8B, "sliding_window": 4096},  # Llama's code does not read it
        {**QWEN3_8B, "layer_types": ["full_attention"] * 36},
    ],
)
def test_a_window_that_never_acts_is_ignored(content: dict[str, Any]) -> None:
    assert model_of(content, "x").window(131072) is None


@pytest.mark.parametrize(
    "content",
    [
        {**MISTRAL, "sliding_window": 4096},
        {k: v for k, v in MISTRAL.items() if k != "sliding_window"},  # MistralConfig's default
        {**QWEN3_8B, **WINDOWED, "max_window_layers": 0},
        {**QWEN3_8B, **WINDOWED, "layer_types": ["sliding_attention"] * 36},
    ],
)
def test_a_window_of_all_layers_is_read_and_written(content: dict[str, Any]) -> None:
    model = model_of(content, "x")
    assert model.window_size == 4096
    written = write_config(model, 32768, None).content
    assert written["sliding_window"] == 4096 and model_of(written, "x").window_size == 4096
    with pytest.raises(ConfigError, match="window_size must be 0, not 9"):
        write_config(replace(model_of(GPT2, "x"), window_size=9), 1024, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_window_layers": 12}, ",".join(["full"] * 12 + ["sliding"] * 24)),
        ({"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 9}, "sliding,sliding,sliding,full"),
    ],
)
def test_layers_with_and_without_the_window_are_read_and_written(given: dict[str, Any], expected: str) -> None:
    model = model_of({**QWEN3_8B, **WINDOWED, **given}, "x")
    assert model.layer_types == expected and model.window_size == 4096
    check(RunConfig(model=model).override({"mock_data": True}), 1)
    written = write_config(model, 32768, None)
    assert written.model_type == "qwen3" and model_of(written.content, "x").layer_types == model.layer_types
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**{**written.content, "model_type": written.model_type})
    assert theirs.layer_types == [f"{name}_attention" for name in model.types_of_layers]
    with pytest.raises(ConfigError, match="layer_types must be empty, not full,sliding"):
        write_config(replace(model_of(GPT2, "x"), window_size=9, layer_types="full,sliding"), 1024, None)


_FILLED_IN = ("num_key_value_heads", "num_global_key_value_heads", "head_dim", "max_position_embeddings")


@pytest.mark.parametrize("model_type", [*ALONE, *COUNTED])
def test_defaults_of_fields_left_out_are_those_of_their_classes(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type)
    family = FAMILIES[model_type]
    switches = {family.renormalises, family.qk_norm_switch} - {""}
    assert all(getattr(theirs, name) == family.defaults.get(name, False) for name in switches)
    read = {*family.names.values(), *family.biases, family.one_kv_head, "tie_word_embeddings"}
    read |= {family.activation} if family.architecture else set()
    read |= {"do_layer_norm_before", "layer_norm_elementwise_affine"} if model_type == "opt" else set()
    for name in read & set(family.defaults):
        value = family.defaults[name]
        if name in ("rope_theta", "partial_rotary_factor"):
            of_full = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
            assert value == of_full.get(name, 1.0)  # a family without the share rotates all
        elif "global_head_dim" in family.defaults and name.endswith("head_dim"):
            of_kind = "full" if name == "global_head_dim" else "sliding"
            assert theirs.per_layer_config[f"{of_kind}_attention"].head_dim == value
        elif name in _FILLED_IN and value is None:
            pass  # filled in from the other sizes, or needed for training alone, where it must be in the file
        else:
            assert getattr(theirs, name) == value, name


@pytest.mark.parametrize("model_type", [name for name in TRAINED if not TRAINED[name].scales_queries])
def test_a_scaling_of_rope_that_is_left_out_is_that_of_the_class(model_type: str) -> None:
    """In a file that is read, and in one that is written of a model without scaling."""
    config_of, family = pytest.importorskip("transformers").AutoConfig.for_model, TRAINED[model_type]
    if not family.has_rope:
        return
    theirs = config_of(model_type).rope_parameters
    theirs = theirs.get("full_attention", theirs)
    assert {"rope_type": "default", **family.default_rope}.items() <= theirs.items()
    assert theirs["rope_type"] == family.default_rope.get("rope_type", "default")
    keys = write_rope(ModelConfig(num_layers=2), family)
    written = config_of(model_type, num_hidden_layers=2, **keys).rope_parameters
    assert written.get("full_attention", written)["rope_type"] == "default"


@pytest.mark.parametrize("content", [LLAMA_31_8B, MISTRAL, QWEN3_8B])
def test_null_key_value_heads_are_as_many_as_all_heads(content: dict[str, Any]) -> None:
    """As in transformers, whatever the family's default."""
    assert model_of({**content, "num_key_value_heads": None}, "x").kv_heads == content["num_attention_heads"]


@pytest.mark.parametrize("model_type", ALONE)
def test_architectures_are_what_transformers_picks(model_type: str) -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == TRAINED[model_type].architecture


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**LLAMA_31_8B, "model_type": "mamba"}, "model_type is 'mamba': memo knows llama, mistral, "),
        ({}, "model_type is None"),
        ({**LLAMA_31_8B, "attention_bias": True}, "attention_bias is True and mlp_bias is False: .* use a model"),
        ({**GEMMA_3_1B, "sliding_window": None}, "with a sliding_window of None: memo computes 26 layers of Gemma3"),
        ({**GEMMA_3_1B, "rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*; or rope_parameters with"),
        (
            {**GEMMA_3_1B, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention.rope_type is linear: memo stretches RoPE in layers without a window",
        ),
        (
            {"model_type": "gemma3n", "text_config": GEMMA_3_1B},
            "model_type is 'gemma3n', a model of text with something else, .*gemma3_text.* the text of qwen3_5, ",
        ),
        ({**QWEN3_8B, "attention_bias": True}, "attention_bias is True, but memo computes Qwen3ForCausalLM only with"),
        ({**LLAMA_31_8B, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but .* only with 1.0"),
        (
            {**LLAMA_31_8B, "quantization_config": {"bits": 4}},
            "quantization_config is set, but .* download the model that it was made from",
        ),
        ({**LLAMA_31_8B, "hidden_act": "gelu"}, "hidden_act is 'gelu': memo computes llama with silu or swish"),
        (
            {**LLAMA_31_8B, "hidden_size": "4096"},
            "hidden_size is '4096' .a string.: give a whole number from 1 to 16777216",
        ),
        (
            {k: v for k, v in LLAMA_31_8B.items() if k != "max_position_embeddings"},
            "max_position_embeddings is missing: complete the file with it, a whole number from 1 to",
        ),
        ({**GPT2, "n_positions": None}, "n_positions or max_position_embeddings is missing: complete the file"),
        ({**LLAMA_31_8B, "model_type": "gemma"}, "model_type is 'gemma': memo knows llama, mistral, .*`memo plan` and"),
        (
            {**MISTRAL, "sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]},
            "with a sliding_window of 4096: memo computes 32 layers of MistralForCausalLM that are all alike, with",
        ),
        (
            {**QWEN3_8B, **WINDOWED, "layer_types": ["full_attention", "sliding_attention"]},  # of 36 layers
            "layers have 'full_attention' and 'sliding_attention', with a sliding_window of 4096: memo computes 36",
        ),
        (
            {**QWEN3_8B, "layer_types": ["full_attention", "sliding_attention"]},
            "and 'sliding_attention', with a sliding_window of None: memo",
        ),
        (
            {**QWEN3_8B, "layer_types": ["sliding_attention"] * 36},
            "layers have 'sliding_attention', with a sliding_window of None",
        ),
        (
            {**LLAMA_31_8B, "layer_types": ["sliding_attention"]},
            "LlamaForCausalLM that are all alike, without a window",
        ),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({**QWEN35_27B["text_config"], "hidden_act": "gelu_pytorch_tanh"}, "computes qwen3_5_text with silu"),
        ({**GPT2, "activation_function": "relu"}, "activation_function is 'relu': .* gelu or gelu_new"),
        ({**QWEN3_8B, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic': .* linear"),
        (
            {**QWEN3_8B, "rope_scaling": LONGROPE},
            "rope_type is 'longrope': memo computes Qwen3ForC.* for shorter sequences",
        ),
        ({**QWEN3_8B, "rope_scaling": {"rope_type": None}}, "rope_scaling.rope_type is None"),
        (
            {**LLAMA_31_8B, "model_type": "deepseek_v4", "n_routed_experts": 256},
            r"'deepseek_v4', a mixture of experts \(n_routed_experts 256\): memo knows llama.*: give a model of one",
        ),
        (
            {**QWEN3_8B, "rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta is 0.1, which memo",
        ),
        (
            {**LLAMA_31_8B, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
            "topk_method is 'group_limited_greedy', but memo computes DeepseekV2ForCausalLM only with 'greedy'",
        ),
        (
            {**LLAMA_31_8B, "model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "dense"] * 16},
            "mlp_layer_types is .*: give 32 words, 'dense' for first layers and then 'sparse'",
        ),
        ({**MISTRAL, "model_type": "ministral3"}, "rope_scaling.llama_4_scaling_beta is missing"),
        (
            {**MISTRAL, "model_type": "phi3", "rope_scaling": YARN},
            "rope_type is 'yarn': memo computes Phi3ForCausalLM with default or longrope",
        ),
        ({**MISTRAL, "model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 numbers for 32 layers"),
        ({**SMOLLM_3, "no_rope_layer_interval": 1}, "no_rope_layers leaves no layer with RoPE: use a model with"),
        ({**SMOLLM_3, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0: give a whole number of 1 or more"),
        (
            {**EXAONE_4, "layer_types": ["full_attention"] * 8},
            "with a sliding_window of 4096: memo computes .*, with one window; use another model",
        ),
        ({**QWEN3_8B, "rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate is 1"),
        ({**QWEN3_8B, "rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        (
            {**QWEN3_8B, "rope_scaling": {**YARN, "factor": "4"}},
            "rope_scaling.factor is '4' .a string.: give a number from 1 to 1000000000",
        ),
        ({**QWEN3_8B, "rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is"),
        ({**GLM_45_AIR, "partial_rotary_factor": 2}, "partial_rotary_factor is 2: give a number above 0 and up to 1"),
        ({**GLM_45_AIR, "rope_parameters": {"partial_rotary_factor": "x"}}, "rope_parameters.partial_rotary_factor is"),
        ({**GLM_45_AIR, "first_k_dense_replace": -1}, "first_k_dense_replace is -1: give a whole number of 0 or more"),
        ({**GLM_45_AIR, "n_shared_experts": 10**9}, "n_shared_experts x moe_intermediate_size is 1408000000000: give"),
        ({**GLM_45_AIR, "n_shared_experts": "1"}, "n_shared_experts is '1' .a string.: give a whole number"),
        ({**QWEN3_8B, "rope_parameters": {"full": {}, "window": {}}}, "one rotation for all layers"),
        ({**LLAMA_31_8B, "attention_bias": "no", "mlp_bias": "no"}, "attention_bias is 'no' .a string.: give true or"),
        ({**QWEN3_8B, "sliding_window": 9, "use_sliding_window": "no"}, "use_sliding_window is 'no' .a string.: give"),
        ({**LLAMA_31_8B, "model_type": {}}, "model_type is {}: memo knows"),
        ({**LLAMA_31_8B, "hidden_act": []}, "hidden_act is .*: memo computes llama"),
        ({**LLAMA_31_8B, "layer_types": 5}, "layer_types is 5 .a whole number.: give a list"),
        ({**LLAMA_31_8B, "rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling is an object of 1: memo has one"),
        ([], "holds a list, not an object"),
    ],
)
def test_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config.json.*{message}"):
        read_config(write(tmp_path, content))


def test_a_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"config.json: the file does not exist: .*`hf download ORG/NAME --local-dir {tmp_path}`"
    ):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: is not JSON"):
        read_config(tmp_path)


def test_a_directory_is_a_model_with_weights(tmp_path: Path) -> None:
    write(tmp_path, QWEN3_8B)
    chosen = choose_model(RunConfig(), str(tmp_path))
    assert chosen == choose_model(RunConfig(), tmp_path)
    assert chosen.model == PRESETS["qwen3-8b"] and chosen.checkpoint.pretrained_checkpoint == str(tmp_path)
    flags = ["--model", str(tmp_path), "--rope-scaling-type", "yarn", "--rope-scaling-factor", "4"]
    parsed = parse_run(flags, prog="memo train")
    assert parsed.checkpoint.pretrained_checkpoint == str(tmp_path)
    assert parsed.model == replace(PRESETS["qwen3-8b"], rope_scaling_type="yarn", rope_scaling_factor=4.0)
    (tmp_path / "run.toml").write_text('pretrained_checkpoint = "where/it/was"')
    moved = parse_run([*flags, "--config", str(tmp_path / "run.toml")], prog="memo train")
    assert moved.checkpoint.pretrained_checkpoint == str(tmp_path)


def test_names_that_are_no_preset_and_no_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tests/cli/refusals.txt has names of models on the hub, and of presets with a slip."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"`hf download ORG/NAME --local-dir \./mine/new`"):
        choose_model(RunConfig(), "./mine/new")
    with pytest.raises(ConfigError, match=r"^--model is a RunConfig, which is a whole run: give it as config="):
        choose_model(RunConfig(), RunConfig())  # type: ignore[arg-type]


def test_the_ancestor_is_kept_where_it_still_says_the_same(tmp_path: Path) -> None:
    ancestor = read_config(write(tmp_path, {**MISTRAL, "eos_token_id": 7, "note": "kept"}))
    same = write_config(ancestor.model, 131072, "float32", ancestor)
    assert same.content == {**ancestor.content, "torch_dtype": "float32"}
    assert write_config(ancestor.model, 131072, None, ancestor).content == ancestor.content
    stretched = replace(ancestor.model, rope_scaling_type="linear", rope_scaling_factor=2.0)
    other = write_config(stretched, 262144, None, ancestor)
    assert other.model_type == "mistral" and "note" not in other.content
    assert other.content["eos_token_id"] == 7 and other.content["torch_dtype"] == "bfloat16"
    assert other.model == replace(stretched, max_position_embeddings=262144, kv_channels=128)
    normed = write_config(replace(ancestor.model, qk_layernorm=True), 131072, None, ancestor)
    assert normed.model_type == "qwen3"


def test_the_ancestor_around_a_text_is_kept(tmp_path: Path) -> None:
    ancestor = read_config(write(tmp_path, GEMMA_3_4B))
    assert write_config(ancestor.model, 131072, None, ancestor).file == GEMMA_3_4B
    stretched = write_config(replace(ancestor.model, rope_scaling_factor=16.0), 262144, "float32", ancestor).file
    assert stretched["text_config"]["rope_scaling"] == {"rope_type": "linear", "factor": 16.0}
    assert stretched["torch_dtype"] == "float32" and "torch_dtype" not in stretched["text_config"]
    outside = {key: value for key, value in GEMMA_3_4B.items() if key not in ("text_config", "torch_dtype")}
    assert outside.items() <= stretched.items()
    other = write_config(PRESETS["llama-3.1-8b"], 131072, None, ancestor)
    assert other.wrapper is None and other.file is other.content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"normalization": "LayerNorm", "activation": "swiglu"}, "normalization must be RMSNorm, not LayerNorm"),
        (
            {"normalization": "RMSNorm", "activation": "swiglu", "qk_layernorm": True, "add_qkv_bias": True},
            "add_qkv_bias must be False, not True",
        ),
        (
            {"position_embedding_type": "learned_absolute", "add_bias_linear": True, "num_query_groups": 2},
            "num_query_groups must be 4, not 2",
        ),
        (
            {"position_embedding_type": "learned_absolute", "add_bias_linear": True, "kv_channels": 64},
            "kv_channels must be 32, not 64",
        ),
        (
            {"normalization": "RMSNorm", "activation": "swiglu", "query_pre_attn_scalar": 24},
            "query_pre_attn_scalar must be 0, not 24",
        ),
        (
            {"normalization": "RMSNorm", "activation": "swiglu", "window_size": 9, "layer_types": "sliding,full"}
            | {"sliding_rotary_base": 500.0},
            "sliding_rotary_base must be 10000.0, not 500.0",
        ),
        (
            {"normalization": "RMSNorm", "activation": "swiglu", "attention_sinks": True},
            "attention_sinks must be False, not True",
        ),
        (
            {"normalization": "RMSNorm", "activation": "swiglu", "rotary_percent": 0.5, "add_qkv_bias": True},
            "rotary_percent must be 1.0, not 0.5",
        ),
        (
            {"normalization": "RMSNorm", "activation": "swiglu", "num_experts": 4, "qk_layernorm": True}
            | {"moe_layer_freq": "[0]+[1]*3", "moe_shared_expert_intermediate_size": 64},
            r"moe_layer_freq must be empty, not \[0\]\+\[1\]\*3; moe_shared_expert_intermediate_size must be 0, not 64",
        ),
    ],
)
def test_a_model_that_no_family_has(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"no architecture of Hugging Face .*{message}"):
        write_config(ModelConfig(vocab_size=61, **fields), 128, None)
