"""Kinds of layers: each is a list of operations."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from memo.config import model_marks as of
from memo.config.model import ModelConfig
from memo.program.operations import (
    Activate,
    ActivateExperts,
    ActivateScored,
    Add,
    Attention,
    Column,
    DeltaNet,
    Expand,
    ExpertColumn,
    ExpertRow,
    Gate,
    Heads,
    LatentNorm,
    Norm,
    Opaque,
    Operation,
    Row,
    Scale,
    Trim,
    WholeColumn,
)
from memo.program.walk import Backward, Step, backward, forward
from memo.spec.custom_layer import custom_facts
from memo.spec.lora import trains_all
from memo.spec.shapes import shape_of
from memo.spec.skeleton import Layout
from memo.spec.slots import NEEDS_FULL_ROOM


@dataclass(frozen=True, eq=False)
class Kind:
    """A layer from the value "input" to the value "layer_output"; one operation works on the whole sequence."""

    operations: tuple[Operation, ...]

    @cached_property
    def before(self) -> tuple[Operation, ...]:
        """The token-wise operations before attention."""
        return self.operations[: self._middle]

    @cached_property
    def after(self) -> tuple[Operation, ...]:
        """The token-wise operations after attention."""
        return self.operations[self._middle + 1 :]

    @cached_property
    def heads(self) -> Heads | None:
        """The operation that prepares queries, keys and values for attention; None for a gated delta net."""
        return next((operation for operation in self.operations if isinstance(operation, Heads)), None)

    @cached_property
    def is_linear(self) -> bool:
        """Whether the operation over the sequence is a gated delta net."""
        return self.heads is None

    @cached_property
    def norms_heads(self) -> bool:
        """Whether a slot holds queries and keys before their norms and before RoPE."""
        return self.heads is not None and not self.heads.in_place

    @cached_property
    def qkv_in_slot(self) -> str:
        """The value in a slot that holds queries, keys and values."""
        return self.heads.reads[0] if self.heads is not None and self.norms_heads else self.sequence_input

    @cached_property
    def sequence_input(self) -> str:
        """The value that the operation over the sequence reads."""
        return self.operations[self._middle].reads[0]

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """For each value, the dim that tp splits."""
        made = {name: operation.layout_of(name) for operation in self.operations for name in operation.makes}
        return {"input": "tokens", **made}

    @cached_property
    def _middle(self) -> int:
        return next(index for index, operation in enumerate(self.operations) if not operation.token_wise)

    # The steps on one tile; `kept`: the values whose rows a slot holds between forward and backward.

    def qkv(self, kept: frozenset[str], again: bool = False) -> tuple[Step, ...]:
        """To queries, keys and values. `again`: in backward, when the slot holds what it keeps."""
        return forward(self.before, frozenset({self.qkv_in_slot}), kept, again)

    def qkv_again(self, kept: frozenset[str]) -> tuple[Step, ...]:
        return self.qkv(kept, again=True)

    def output(self, kept: frozenset[str]) -> tuple[Step, ...]:
        """From attention's output to the layer's."""
        return forward(self.after, frozenset({"layer_output"}), kept)

    def after_backward(self, kept: frozenset[str]) -> Backward:
        """From the gradient of the layer's output to that of attention's."""
        return backward(self.after, kept, frozenset({"layer_output"}))

    def before_backward(self, kept: frozenset[str]) -> Backward:
        """From the gradients of what attention reads, and of the residual path, to that of the input."""
        return backward(self.before, kept | {NEEDS_FULL_ROOM}, frozenset({self.sequence_input, "input"}))


def _mlp(x: str) -> tuple[Operation, ...]:
    return (
        Column((x,), ("fc1",), "mlp.fc1"),
        Activate(("fc1",), ("activation",), "mlp.activate"),
        Row(("activation",), ("mlp_out",), "mlp.fc2"),
    )


def _gating(model: ModelConfig) -> tuple[Operation, ...]:
    norm: tuple[Operation, ...] = ()
    if "attention_norm" in model.norms:  # computed twice, because its output is not kept
        norm = (Norm(("input",), ("gate_norm",), "attention_norm"),)
    return (
        *norm,
        Column(("gate_norm" if norm else "input",), ("gate",), "attention.gate"),
        Gate(("attention_out", "gate"), ("gated",), "attention.gating"),
    )


def _queries_keys_values(model: ModelConfig, x: str) -> tuple[Operation, ...]:
    """From the normed input of a layer to "qkv"."""
    if not model.multi_latent_attention:
        return (Column((x,), ("qkv",), "attention.qkv"),)
    queries = () if model.q_lora_rank else (Column((x,), ("queries",), "attention.q"),)
    return (
        WholeColumn((x,), ("latent",), "attention.latent"),
        LatentNorm(("latent",), ("latent_norm",), "attention.latent_norm"),
        *queries,
        Expand(("latent_norm", *(name for op in queries for name in op.makes)), ("qkv",), "attention"),
    )


_SHARED = (Activate(("shared_fc1",), ("shared_activation",), "mlp.shared.activate"),)
_SHARED_GATED = (
    WholeColumn(("mlp_norm",), ("shared_score",), "mlp.shared.score"),
    ActivateScored(("shared_score", "shared_fc1"), ("shared_activation",), "mlp.shared.activate_scored"),
)


def _experts(model: ModelConfig) -> tuple[Operation, ...]:
    """From the normed residual to the sum of the outputs of routed and shared experts."""
    own = of.INTO_EXPERTS if model.moe_separate_norms else ()
    biases = ("routing",) if model.add_bias_linear else ()
    chosen = (
        *(Norm(("residual",), (name,), name) for name in own),
        ExpertColumn(own or ("mlp_norm",), ("fc1", "routing"), "mlp.fc1"),
        ActivateExperts(("routing", "fc1"), ("activation",), "mlp.activate"),
        ExpertRow(("activation", *biases), ("mlp_out",), "mlp.fc2"),
    )
    if not model.shared_ffn_size:
        return chosen
    after_shared, shared = _norm(model, "shared_out", "shared_out_norm")
    after_chosen, made = _norm(model, "mlp_out", "experts_out_norm")
    return (
        *chosen,
        *after_chosen,
        Column(("mlp_norm",), ("shared_fc1",), "mlp.shared.fc1"),
        *(_SHARED_GATED if model.shared_is_gated else _SHARED),
        Row(("shared_activation",), ("shared_out",), "mlp.shared.fc2"),
        *after_shared,
        Add((made, shared), ("experts_out",)),
    )


@lru_cache(maxsize=64)
def kind_of(model: ModelConfig) -> Kind:
    """The kind of a model's layers."""
    attention = Attention(("heads",), ("attention_out", "lse"), "attention.core")
    if model.custom_layer:
        recalled = tuple(name for name, _ in custom_facts(model).recalled)
        return Kind(
            (
                Opaque(("input",), ("qkv",), "before_attention"),
                Heads(("qkv",), ("heads",), "attention"),
                attention,
                Opaque(("input", "attention_out"), ("layer_output", *recalled), "after_attention"),
            )
        )
    before, into_attention = _norm(model, "input", "attention_norm")
    between, into_mlp = _norm(model, "residual", "mlp_norm")
    mlp = _experts(model) if model.num_experts else _mlp(into_mlp)
    middle: tuple[Operation, ...] = (
        Heads(("qkv",), ("heads",), "attention", normed=model.qk_layernorm),
        attention,
    )
    if model.is_linear:
        middle = (DeltaNet(("qkv",), ("attention_out",), "attention.core"),)
    gating = _gating(model) if model.attention_output_gate else ()
    if model.value_dim < model.head_dim:
        gating = (Trim(("attention_out",), ("trimmed",), "attention.trim"),)
    out = gating[-1].makes[0] if gating else "attention_out"
    after_attention, attended = _norm(model, "projected", "attention_out_norm")
    after_mlp, made = _norm(model, mlp[-1].makes[0], "mlp_out_norm")
    ending: tuple[Operation, ...] = (Add(("residual", made), ("layer_output",)),)
    if model.layer_scalar:
        ending = (Add(("residual", made), ("layer_sum",)), Scale(("layer_sum",), ("layer_output",)))
    return _as_trained(
        model,
        (
            *before,
            *_queries_keys_values(model, into_attention),
            *middle,
            *gating,
            Row((out,), ("projected",), "attention.projection"),
            *after_attention,
            Add(("input", attended), ("residual",)),
            *between,
            *mlp,
            *after_mlp,
            *ending,
        ),
    )


def _as_trained(model: ModelConfig, operations: tuple[Operation, ...]) -> Kind:
    """Mark frozen matrices, whose backward needs no input. The experts' first matrix is not marked, because its
    backward computes the router's scores again from the input."""
    if trains_all(model):
        return Kind(operations)
    trained = {
        weight.name.split(".adapter.")[0] for weight in shape_of(model, "", 0).layer_weights if not weight.frozen
    }
    matrices = (op for op in operations if isinstance(op, Column | Row) and not isinstance(op, ExpertColumn))
    idle = {op for op in matrices if not trained & {op.module, f"{op.module}.weight", f"{op.module}.bias"}}
    return Kind(tuple(replace(op, frozen=True) if op in idle else op for op in operations))


def _norm(model: ModelConfig, x: str, name: str) -> tuple[tuple[Operation, ...], str]:
    """The norm of `x` if the model's layers have a norm of this name, and the value that later operations read."""
    return ((Norm((x,), (name,), name),), name) if name in model.norms else ((), x)
