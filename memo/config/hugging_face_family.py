"""Facts about a family of models of Hugging Face: the meaning of its config.json, and the names of its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from memo.artifacts.fields import accepted, checked, field_types
from memo.artifacts.reading import Source, shown
from memo.config.hugging_face_tensors import TensorNames
from memo.config.model import Activation, ModelConfig
from memo.errors import MemoError


class Biases(NamedTuple):
    """Which linear layers have biases: always, never, or as the switch of that name in the file says."""

    qkv: bool | str
    projection: bool | str
    mlp: bool | str


SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Fields and keys of caps; null: no cap."""
NO_BIASES = Biases(False, False, False)
ALL_BIASES = Biases(True, True, True)
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "n_inner": None,
    "max_position_embeddings": None,
    "n_positions": 1024,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "activation_function": "gelu_new",
    "use_bias": True,
    "enable_bias": True,
    "multi_query": True,
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
}
"""Defaults of most classes of transformers for keys that a file leaves out; None: the default of ModelConfig."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The meaning of the config.json of one model_type, by which its models are counted and planned for.

    Attributes:
        names: numbers of ModelConfig -> their keys.
        aliases: their keys -> other keys that say the same.
        defaults: their keys that a file may leave out -> the default of their class in transformers, where it is not
            that of DEFAULTS. Switches without a default are off.
        fixed: fields of ModelConfig that all of its models share, besides activation and biases.
        gated: whether the MLP has two input projections.
        one_kv_head: the switch with which all heads share a single key/value head; empty: the family has none.
        spare_positions: rows of a learned table of positions before the first one.
        rotary_channels: the key of the number of channels of a head that are rotated, by which a file may state their
            share; empty: the family has none.
        qk_norm_switch: the switch of the norms of q and k heads; empty: the family has none.
        keys_as_values: the switch with which layers without a window have no matrix of values, and may have a number of
            key/value heads of their own; empty: the family has none.
        renormalises: the switch with which the weights of a token's experts sum to 1; empty: they always do.
        experts_switch: the switch with which all layers have experts beside the MLP, whose numbers `names_of_experts`
            has, and which then is the shared one; empty: the family has none.
        dense_first: the key of the number of first layers without experts, or of a list with a word for each layer;
            empty: none.
        shared_experts: the key of the number of experts, as wide as the others, that all tokens share; empty: none.
        beyond: facts that ModelConfig cannot express, as fields of memo.spec.shapes.ModelShape; called with the file
            and the nearest ModelConfig.
        architecture: the class that AutoModelForCausalLM picks; a class without a head where transformers has the
            text in larger models alone. This attribute and all below are for families whose mathematics memo computes:
            their models are trained, imported and exported as well.
        tensors: the names of its weights.
        activation: the key with the name of the activation.
        own_activation: the activation that the family calls silu, where it has no other one.
        only: their other keys -> the values that memo computes with; the first stands for a key that is left out.
        window: the key that turns a sliding window on; empty: the family has none.
        default_window: the window of a file that states none.
        layer_types: whether a file may say which layers have the window, or a delta net.
        default_layer_types: kinds of layers, repeated, of a file that does not list them; empty: all have the window.
        layer_pattern: the key of the period of layers in a file that does not list them: only the last layer of each
            period has no window and no delta net; empty: the family has none.
        sliding_base: the key of RoPE's base in layers with the window, whose frequencies nothing stretches; it may be
            the key of all layers' base; empty: all layers rotate alike.
        rope_layers: the key of a list with 1 for layers with RoPE and 0 for layers without it, or sliding_attention,
            where layers without the window have no RoPE if other layers have the window; empty: all layers have it.
        rotations: the words of rope_type that its models may have.
        default_rope: the scaling of a file without one.
        scales_scores: whether the scaling of RoPE has a key by which scores of attention grow.
        scales_queries: whether the scaling of RoPE has a key by which queries grow with their position.
        packed: whether experts may be published in MXFP4.
        layers_beyond: the key of the number of layers after the last, which predict further tokens and are left out.
    """

    names: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"normalization": "RMSNorm"})
    gated: bool = True
    one_kv_head: str = ""
    spare_positions: int = 0
    rotary_channels: str = ""
    qk_norm_switch: str = ""
    keys_as_values: str = ""
    renormalises: str = ""
    experts_switch: str = ""
    names_of_experts: Mapping[str, str] = field(default_factory=dict)
    dense_first: str = ""
    shared_experts: str = ""
    biases: Biases = NO_BIASES
    beyond: Callable[["ConfigKeys", ModelConfig], Mapping[str, Any]] = lambda keys, model: {}

    architecture: str = ""
    tensors: TensorNames = field(default_factory=lambda: TensorNames({}))
    activation: str = "hidden_act"
    own_activation: Activation | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    window: Literal["", "sliding_window", "use_sliding_window"] = ""
    default_window: int | None = None
    layer_types: bool = False
    default_layer_types: tuple[str, ...] = ()
    layer_pattern: str = ""
    sliding_base: str = ""
    rope_layers: Literal["", "no_rope_layers", "sliding_attention"] = ""
    rotations: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    scales_scores: bool = False
    scales_queries: bool = False
    packed: bool = False
    layers_beyond: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", {**DEFAULTS, **self.defaults})

    @property
    def has_delta_nets(self) -> bool:
        return "linear_num_key_heads" in self.names

    @property
    def has_rope(self) -> bool:
        return self.fixed.get("position_embedding_type", "rope") == "rope"

    @property
    def qkv_bias_switch(self) -> str:
        """Their switch of biases of q, k and v alone; empty: there is none."""
        return self.biases.qkv if isinstance(self.biases.qkv, str) and self.biases.projection != self.biases.qkv else ""

    @property
    def activations(self) -> dict[str, Activation]:
        """Their names of the activations that memo computes -> its own."""
        if self.own_activation is not None:
            return {"silu": self.own_activation}
        if self.gated:
            return {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
        return {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

    @property
    def bias_switches(self) -> tuple[str, ...]:
        """Their switches that together are add_bias_linear; none where the MLP's biases have no switch."""
        switches = tuple(dict.fromkeys(switch for switch in self.biases if isinstance(switch, str)))
        return switches if isinstance(self.biases.mlp, str) else ()


@dataclass(frozen=True)
class ConfigKeys:
    """One config.json, where it comes from, and its family. Every refusal names file, key, value and remedy."""

    content: Mapping[str, Any]
    family: Family
    source: Source

    def get(self, key: str) -> Any:
        """The value as the file has it, else the default of the family. Raises the source's error where two names of
        one value have different values."""
        value, other = self.content.get(key), self.family.aliases.get(key)
        same = None if other is None else self.content.get(other)
        if same is not None and value is not None and same != value:
            raise self.source.refusal(
                f"{key} is {shown(value)} and {other} is {shown(same)}, but both say the same",
                f"remove the one that is wrong; transformers reads {other}",
            )
        if same is not None:
            return same
        return self.content.get(key, self.family.defaults.get(key))

    def number(self, ours: str, key: str) -> Any:
        """A value with the type and the range of the field `ours` of ModelConfig.

        Null has a meaning in transformers for some keys, that of the field's default: all heads, no latent, no cap.
        Otherwise it is returned only if it is the family's default.
        """
        value = self.get(key)
        if value is None and key in ("num_key_value_heads", "num_global_key_value_heads", "q_lora_rank", *SOFTCAPS):
            return getattr(ModelConfig, ours)
        if value is None and self.family.defaults.get(key, 0) is not None:
            raise self.missing(ours, key)
        return as_field(ours, value, key, self.source)

    def optional(self, kind: Any, key: str) -> Any:
        """A value of this type, or None."""
        return checked(kind | None, self.content.get(key), key, self.source)

    def switch(self, key: str) -> bool:
        """Whether a switch is on; null is off, as in transformers."""
        return bool(checked(bool | None, self.get(key), key, self.source))

    def missing(self, ours: str, key: str) -> MemoError:
        """The error of a file without this key."""
        names = (key, self.family.aliases[key]) if key in self.family.aliases else (key,)
        kind = accepted(field_types(ModelConfig)[ours])
        return self.source.refusal(f"{' or '.join(names)} is missing", f"complete the file with it, {kind}")


MLP_TYPES = "mlp_layer_types"


def mlp_types(dense: int, layers: int) -> list[str]:
    """The list of MLP_TYPES in a file."""
    return ["dense"] * dense + ["sparse"] * (layers - dense)


def period_of(each: Sequence[str]) -> list[str]:
    """The shortest list that gives `each` where it is repeated."""
    lengths = range(1, len(each) + 1)
    return next((list(each[:n]) for n in lengths if all(one == each[i % n] for i, one in enumerate(each))), [])


def as_field(ours: str, value: object, key: str, source: Source) -> Any:
    """A value with the type and the range of the field `ours` of ModelConfig. Raises the source's error."""
    return checked(field_types(ModelConfig)[ours], value, key, source)
