"""What memo has to know of a family of models of Hugging Face: its config.json, and how it calls its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from memo.artifacts.fields import accepted, checked, field_types
from memo.artifacts.reading import Source, shown
from memo.config.model import Activation, ModelConfig, Normalization, NormPlacement, PositionEmbedding, ScoreFunction
from memo.errors import MemoError


class Biases(NamedTuple):
    """Which linear layers have biases: always, never, or as the switch of that name in the file says."""

    qkv: bool | str
    projection: bool | str
    mlp: bool | str


NO_BIASES = Biases(False, False, False)
ALL_BIASES = Biases(True, True, True)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the config.json of one model_type means, so that its models can be counted and planned for.

    Attributes:
        names: numbers of ModelConfig -> their keys.
        aliases: their keys -> other keys that say the same.
        defaults: their keys that a file may leave out -> what their class in transformers then takes, where None is
            the default of ModelConfig. Switches without a default are off.
        gated: whether the MLP has two input projections.
        one_kv_head: the switch with which all heads share a single key/value head; empty: the family has none.
        spare_positions: rows of a learned table of positions before the first one.
        renormalises: the switch with which the weights of a token's experts sum to 1; empty: they always do.
        dense_first: the key of how many layers, the first ones, have no experts; empty: none.
        shared_experts: the key of how many experts, of the width of the others, all tokens share; empty: none.
        beyond: what no ModelConfig says, as fields of memo.spec.shapes.ModelShape; it is given the file and the
            nearest ModelConfig.
    """

    names: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any]
    normalization: Normalization = "RMSNorm"
    position_embedding_type: PositionEmbedding = "rope"
    qk_layernorm: bool | str = False
    """Always, never, or as the switch of that name says."""
    qk_layernorm_across_heads: bool = False
    attention_sinks: bool = False
    attention_output_gate: bool = False
    norm_placement: NormPlacement = "before"
    apply_layernorm_1p: bool = False
    scale_embeddings: bool = False
    moe_shared_expert_gate: bool = False
    gated: bool = True
    one_kv_head: str = ""
    spare_positions: int = 0
    renormalises: str = ""
    dense_first: str = ""
    shared_experts: str = ""
    moe_router_score_function: ScoreFunction = "softmax"
    moe_router_enable_expert_bias: bool = False
    biases: Biases = NO_BIASES
    beyond: Callable[["ConfigKeys", ModelConfig], Mapping[str, Any]] = lambda keys, model: {}

    @property
    def fixed(self) -> dict[str, Any]:
        """Fields of ModelConfig that all of its models share, besides activation and biases."""
        ours, switch = {entry.name for entry in fields(ModelConfig)}, self.qk_norm_switch
        names = [entry.name for entry in fields(Family) if entry.name in ours]
        return {name: getattr(self, name) for name in names if name != "qk_layernorm" or not switch}

    @property
    def has_delta_nets(self) -> bool:
        return "linear_num_key_heads" in self.names

    @property
    def qk_norm_switch(self) -> str:
        return self.qk_layernorm if isinstance(self.qk_layernorm, str) else ""

    @property
    def qkv_bias_switch(self) -> str:
        """Their switch of biases of q, k and v alone; empty: there is none."""
        return self.biases.qkv if isinstance(self.biases.qkv, str) and self.biases.projection is False else ""


@dataclass(frozen=True)
class ConfigKeys:
    """One config.json, where it comes from, and its family. Every refusal names file, key, value and remedy."""

    content: Mapping[str, Any]
    family: Family
    source: Source

    def get(self, key: str) -> Any:
        """The value as the file has it, else the default of the family. Raises the source's error for two names of one
        value that differ."""
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

        None only if that is the family's default, or of key/value heads, where transformers takes it for all heads.
        """
        value = self.get(key)
        if value is None and key != "num_key_value_heads" and self.family.defaults.get(key, 0) is not None:
            raise self.missing(ours, key)
        return checked(field_types(ModelConfig)[ours], value, key, self.source)

    def switch(self, key: str) -> bool:
        """One that is null is off, as for transformers."""
        return bool(checked(bool | None, self.get(key), key, self.source))

    def missing(self, ours: str, key: str) -> MemoError:
        """The error of a file without this key."""
        names = (key, self.family.aliases[key]) if key in self.family.aliases else (key,)
        kind = accepted(field_types(ModelConfig)[ours])
        return self.source.refusal(f"{' or '.join(names)} is missing", f"complete the file with it, {kind}")


@dataclass(frozen=True)
class TensorNames:
    """What modules are called in *.safetensors; the name of a weight ends with .weight or .bias.

    Attributes:
        layers: what stands before the number of a layer.
        modules: memo's modules of a layer -> theirs. Modules of one name are parts of its rows, in this order.
        ends: memo's modules before and after the layers -> theirs.
            A * stands for the number of an expert; without one, the name is of a tensor that has all experts'.
        groups: their modules in which parts take turns -> how many turns: one a row, head, or head of keys in a delta
            net; else one part stands below the other.
        transposed: whether matrices of layers are stored as [in, out], as by GPT-2's Conv1D; memo stores [out, in].
        transposed_experts: the same of the matrices in a tensor that has all experts'.
    """

    layers: str
    modules: Mapping[str, str]
    ends: Mapping[str, str]
    transposed: bool = False
    transposed_experts: bool = False
    groups: Mapping[str, Literal["rows", "heads", "key_heads"]] = field(default_factory=dict)

    def stacked(self) -> "TensorNames":
        """The names under which all experts' matrices lie in one tensor, where they have a tensor each."""
        found = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
        modules = {
            ours: theirs if not theirs.startswith(_EXPERTS) else f"{_STACK}{found[theirs.removeprefix(_EXPERTS)]}"
            for ours, theirs in self.modules.items()
        }
        return replace(self, modules=modules)


_EXPERTS, _STACK = "mlp.experts.*.", "mlp.experts."


@dataclass(frozen=True, kw_only=True)
class TrainedFamily(Family):
    """A family whose mathematics memo does: its models are trained, imported and exported as well.

    Attributes:
        architecture: the class that AutoModelForCausalLM picks.
        tensors: what its weights are called.
        activation: the key with the name of the activation.
        own_activation: what stands for silu, where the family has its own.
        only: their other keys -> the values that memo computes with; the first stands for a key that is left out.
        window: the key that turns a sliding window on; empty: the family has none.
        default_window: the window of a file that states none.
        layer_types: whether a file may say which layers have the window.
        default_layer_types: which have it in a file that does not say so, repeated; empty: all.
        layer_pattern: the key of how many layers are repeated, of which the last alone has no window, in a file that
            does not say which layers have it; empty: the family has none.
        sliding_base: the key of RoPE's base in layers with the window, whose frequencies nothing stretches, which may
            be that of all layers; empty: all layers rotate alike.
        packed: whether experts may be published in MXFP4.
        layers_beyond: the key of how many layers stand behind the last, to predict further tokens; they are left out.
    """

    architecture: str
    tensors: TensorNames
    activation: str = "hidden_act"
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    window: Literal["", "sliding_window", "use_sliding_window"] = ""
    default_window: int | None = None
    layer_types: bool = False
    default_layer_types: tuple[str, ...] = ()
    layer_pattern: str = ""
    sliding_base: str = ""
    packed: bool = False
    layers_beyond: str = ""
    own_activation: Activation | None = None

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
