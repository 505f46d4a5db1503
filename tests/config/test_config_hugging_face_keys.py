"""Every key of a config.json that transformers reads for a family that memo trains is read by memo, refused, or without
effect: any other would change a model without a word."""

import copy
import dataclasses
import inspect
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_directories import ALONE, CONFIGS, VOCAB

from memo.config.hugging_face import model_of
from memo.config.hugging_face_families import TRAINED
from memo.errors import ConfigError
from memo.model.rope import rope_frequencies

transformers = pytest.importorskip("transformers")
_DROPOUT = "memo trains without dropout, and generates and evaluates without it as everyone does"
_OUTPUTS = "says what a call in Python returns beside logits"
_LABELS = "belongs to models that classify"
_NAMES = "says where a file came from, not what it holds"
_GENERATION = "is for generation in Python"
_BALANCE = "adds to the loss of transformers' training"
_KERNELS = "chooses kernels for the same mathematics"
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "_commit_hash": ("0", _NAMES),
    "_rope_type_labels": (["other"], "names rotations of layers, and memo refuses a file with several"),
    "architectures": (["Other"], "model_type decides the family"),
    "attention_chunk_size": (4, "is read for layers of chunked attention, which layer_types names and memo refuses"),
    "attention_dropout": (0.5, _DROPOUT),
    "attn_implementation": ("eager", _KERNELS),
    "attn_pdrop": (0.5, _DROPOUT),
    "bos_token_id": (3, _GENERATION),
    "chunk_size_feed_forward": (2, "cuts the tokens of an MLP, each of which is computed for itself"),
    "classifier_dropout": (0.5, _LABELS),
    "default_theta": (500.0, "belongs to the class; a file says rope_theta"),
    "dtype": (None, "memo's own flags choose the dtype"),
    "embd_pdrop": (0.5, _DROPOUT),
    "embedding_dropout": (0.5, _DROPOUT),
    "eos_token_id": (4, _GENERATION),
    "experts_implementation": ("eager", _KERNELS),
    "hidden_dropout": (0.5, _LABELS),
    "id2label": ({"0": "a"}, _LABELS),
    "intermediate_size": (48, "belongs to the MLP of dense layers, beside which memo refuses experts"),
    "label2id": ({"a": 0}, _LABELS),
    "max_window_layers": (1, "counts layers without a window, where one is switched on"),
    "name_or_path": ("other", _NAMES),
    "num_labels": (3, _LABELS),
    "num_mtp_layers": (2, _GENERATION),
    "output_attentions": (True, _OUTPUTS),
    "output_router_logits": (True, _BALANCE),
    "router_aux_loss_coef": (0.5, _BALANCE),
    "router_jitter_noise": (0.5, _DROPOUT),
    "output_hidden_states": (True, _OUTPUTS),
    "pad_token_id": (5, "stops the gradient of one row of the embedding, whose token no sample of memo holds"),
    "pretraining_tp": (2, "once split products for bits equal to those of a layout"),
    "problem_type": ("regression", _LABELS),
    "reorder_and_upcast_attn": (True, "computes scores in fp32, as memo's kernels do"),
    "resid_pdrop": (0.5, _DROPOUT),
    "residual_dropout": (0.5, _DROPOUT),
    "return_dict": (True, _OUTPUTS),
    "summary_activation": ("tanh", _LABELS),
    "summary_first_dropout": (0.5, _LABELS),
    "summary_last_dropout": (0.5, _LABELS),
    "summary_proj_to_labels": (False, _LABELS),
    "summary_type": ("first", _LABELS),
    "summary_use_proj": (False, _LABELS),
    "torch_dtype": (None, "memo's own flags choose the dtype"),
    "transformers_version": ("4.0.0", _NAMES),
    "use_cache": (False, _GENERATION),
    "use_sliding_window": (False, "is looked at where sliding_window is a number"),
}
"""By key: a value that is not the default, and why no logit depends on it."""
_ORIGINAL = "original_max_position_embeddings"
_OF_SHARED_KEYS = {"kv_sharing_modes", "return_shared_kv_states", "shared_kv_states", "use_double_wide_mlp"}
"""Read where layers share keys and values, which memo refuses (num_kv_shared_layers)."""
_OF_EXPERTS = {"moe_intermediate_size", "num_experts", "top_k_experts"}
"""Read where enable_moe_block is on."""
_BY_LAYER = {"vocab_size_per_layer_input", "hidden_act"}
"""Read of models with embeddings by layer, which memo refuses, and of parts for images and audio."""
_OF_AUDIO = {"attention_context_left", "attention_context_right", "attention_invalid_logits_value"}
_OF_AUDIO |= {"attention_logit_cap", "conv_kernel_size", "gradient_clipping", "output_proj_dims", "residual_weight"}
_OF_AUDIO |= {"pooling_kernel_size", "position_embedding_size", "standardize", "subsampling_conv_channels"}
_OF_AUDIO |= {"use_clipped_linears"}
_WITHOUT_YARN = {
    "gpt2": {"rope_parameters", "rope_scaling", "rope_theta", _ORIGINAL, "head_dim"},
    "phi3": {_ORIGINAL},
    "gemma4_text": {_ORIGINAL, *_OF_SHARED_KEYS, *_OF_AUDIO, *_OF_EXPERTS, *_BY_LAYER},
    "gemma4_unified_text": {_ORIGINAL, *_OF_SHARED_KEYS},
}
"""By model_type, keys of rotations that the family does not have, and of parts that memo refuses or passes through."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_OF_IMAGES = {"image_token_id", "mm_tokens_per_image", "text_config", "token_type_ids", "vision_config"}
_OF_IMAGES |= {"depth", "image_grid_thw", "in_channels", "mm_token_type_ids", "num_heads", "num_position_embeddings"}
_OF_IMAGES |= {"out_hidden_size", "patch_size", "spatial_merge_size", "temporal_patch_size"}
_OF_IMAGES |= {"video_grid_thw", "video_token_id", "audio_config", "audio_token_id"}
_OF_CALLS = {"allow_is_causal_skip", "cu_seq_lens_q", "past_key_values"}
_NO_KEYS = {"json", "crossattention", "q_attn", *_OF_CALLS, *_OF_IMAGES}
"""What the patterns below find in the code of transformers beside keys of the family's files."""


class _Recorded(dict[str, Any]):
    """A config.json that notes which keys were looked at."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


def _tiny(name: str) -> dict[str, Any]:
    """A config.json of a name of CONFIGS, whose window is off where that can be."""
    return {"model_type": name.partition("-")[0], "sliding_window": None, **CONFIGS[name][1]}


def _logits(content: dict[str, Any]) -> torch.Tensor:
    """What transformers computes of one model, whose weights depend on their names alone."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(content))  # it adds to what is inside
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.state_dict().items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight.copy_(torch.rand(weight.shape, generator=generator) - 0.4)
    tokens = torch.arange(24).reshape(2, 12) * 7 % VOCAB
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens, return_dict=True).logits
    return found


def _keys_of_transformers(model_type: str) -> set[str]:
    """Fields and other names of the family's configuration, and what modelling code asks a configuration for."""
    from transformers import PreTrainedConfig, masking_utils, modeling_rope_utils

    kind = type(transformers.AutoConfig.for_model(model_type))
    folder = Path(inspect.getfile(kind))
    code = [folder.with_name(f"modeling_{folder.parent.name}.py").read_text(), inspect.getsource(kind)]
    shared = (PreTrainedConfig.__post_init__, modeling_rope_utils, masking_utils)
    found = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    for text in [*code, *map(inspect.getsource, shared)]:
        found.update(re.findall(r"\bconfig\.([a-z]\w*)\b(?!\()", text))
        found.update(re.findall(r'(?:config|self), "(\w+)"', text))
        found.update(re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', text))
    return found - _NO_KEYS


@pytest.mark.parametrize("model_type", ALONE)
def test_every_key_is_read_or_refused_or_without_effect(model_type: str) -> None:
    has_yarn = model_type not in _WITHOUT_YARN
    content = {**_tiny(model_type), "rope_scaling": YARN if has_yarn else None}  # YaRN reads most keys
    if TRAINED[model_type].scales_queries:
        content["rope_scaling"] = {**YARN, "llama_4_scaling_beta": 0.1}
    lists = ("layer_types", "no_rope_layers")  # a file without them is read by their periods
    without_lists = {key: value for key, value in content.items() if key not in lists} | {"num_hidden_layers": 4}
    read = set[str]()
    for each in (_Recorded(content), _Recorded(without_lists if has_yarn else content)):
        model_of(each, "x")
        read |= each.read
    unread = _keys_of_transformers(model_type) - read - set(WITHOUT_EFFECT)
    assert unread - _WITHOUT_YARN.get(model_type, set()) == set()


@pytest.mark.parametrize("model_type", ALONE)
def test_no_logit_depends_on_keys_without_effect(model_type: str) -> None:
    content = _tiny(model_type)
    expected = _logits(content)
    keys = _keys_of_transformers(model_type) & set(WITHOUT_EFFECT) - set(content)
    if "global_head_dim" in TRAINED[model_type].names.values():
        keys.remove("attention_chunk_size")  # transformers refuses it beside heads that differ by layer
    for key in sorted(keys):
        model_of({**content, key: WITHOUT_EFFECT[key][0]}, "x")
        found = _logits({**content, key: WITHOUT_EFFECT[key][0]})
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    ("name", "change"),
    [("llama", {"is_causal": False}), ("llama", {"rope_scaling": YARN}), ("gpt2", {"num_attention_heads": 2})],
)
def test_the_comparison_of_logits_sees_what_has_an_effect(name: str, change: dict[str, Any]) -> None:
    content = _tiny(name)
    assert not torch.allclose(_logits({**content, **change}), _logits(content), rtol=1e-3, atol=1e-3)


_THETA = {"rope_theta": 500.0}
_LENGTH = {"original_max_position_embeddings": 16}
_BANDS = {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 64}
_ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {**_THETA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "bands of llama3": {**_THETA, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, **_BANDS}},
    "other betas": {**_THETA, "rope_scaling": {**YARN, "beta_fast": 2.0, "beta_slow": 0.5}},
    "no stretch": {**_THETA, "rope_scaling": {**YARN, "factor": 1.0}},
    "older": {**_THETA, "rope_scaling": YARN},
    "newer": {"rope_parameters": {**YARN, **_THETA}},
    "a factor": {**_THETA, "rope_scaling": {**YARN, "attention_factor": 2.0}},
    "a factor by two weights": {**_THETA, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "one weight alone": {**_THETA, "rope_scaling": {**YARN, "mscale": 0.7}},
    "both, equal": {"rope_parameters": {**YARN, **_THETA}, "rope_scaling": {**YARN, **_THETA}},
    "the other is empty": {"rope_parameters": {}, "rope_scaling": YARN, **_THETA},
    "two bases": {"rope_theta": 900.0, "rope_parameters": {**YARN, **_THETA}},
    "the length beside": {**_THETA, "rope_scaling": YARN, **_LENGTH},
    "the length beside no rotation": {**_THETA, **_LENGTH},
}


@pytest.mark.parametrize("change", _ROTATIONS.values(), ids=_ROTATIONS)
def test_rotations_are_those_of_transformers(change: dict[str, Any]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    content = {key: value for key, value in _tiny("llama").items() if key != "rope_theta"} | {"head_dim": 64} | change
    ours, scale = rope_frequencies(model_of(content, "x"))
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**copy.deepcopy(content)))
    torch.testing.assert_close(ours, theirs.inv_freq.double(), rtol=1e-6, atol=0.0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-15)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", **_THETA}, "rope_scaling": YARN},
            """x: rope_parameters is '{"rope_type": "default", "rope_theta": 500.0}', but rope_scaling is """
            """'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}', and transformers """
            "reads the latter alone: move what rope_scaling says into rope_parameters, beside its rope_theta, and ",
        ),
        ("llama", {"is_causal": False}, "is_causal is False, but memo computes LlamaForCausalLM only with True"),
        (
            "gemma4_text",
            {"per_layer_config": {"0": {"head_dim": 24}}},
            "memo computes Gemma4ForCausalLM with equal heads in all layers that are full_attention",
        ),
        ("qwen3", {"per_layer_config": {"0": {"rms_norm_eps": 1.0}}}, "per_layer_config is set, but memo computes"),
        (
            "gpt2",
            {"hidden_size": 64},
            "n_embd is 32 and hidden_size is 64, but both say the same: remove the one that is wrong; transformers "
            "reads hidden_size",
        ),
    ],
)
def test_what_would_change_the_model_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_of({**_tiny(name), **change}, "x")


def test_gpt2_may_be_written_with_the_names_of_other_families() -> None:
    content = _tiny("gpt2")
    names = {own: other for other, own in transformers.GPT2Config.attribute_map.items()}
    assert model_of({names.get(key, key): value for key, value in content.items()}, "x") == model_of(content, "x")
