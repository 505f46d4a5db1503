"""The shape of a decoder-only transformer, and the table of its parameters.

    layer      norm, q k v (a + 2 k heads of d), projection, norm, fc1 (f, or 2 f when gated), fc2
               or instead of the last two router, and fc1 and fc2 of each expert
    ends       embedding (v x h), positions, embedding norm, final norm, head (v x h unless tied)

`ModelShape` also holds models that memo cannot train (OPT, BLOOM, NeoX, ...); `shape_of` makes one of a
ModelConfig, `memo.estimate.hf_config` of a published config.json, whose families are a table in
memo/config/hugging_face_families.py. Known error: none in the counts of the
families that are tested. Where layers are of several kinds (memo.spec.stack), each has a shape of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from memo.config import ModelConfig
from memo.spec.custom_layer import custom_facts
from memo.spec.delta import TAPS
from memo.spec.lora import adapter_names, as_trained
from memo.spec.stack import kinds_of, stack_of
from memo.spec.weights import Init, Split, Weight, is_of_adapter, one

_WIDENING = "embedding_projection.weight"
EXPERT_BIAS = "mlp.router.expert_bias"
"""The tensor in a layer of what its router adds to scores where it chooses."""
_Parts = tuple[tuple[str, int], ...]
"""Names of tensors, and their rows."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements; counts of parameters follow from them exactly.

    Attributes:
        head_dim: size of one head; heads x head_dim may differ from hidden.
        norm_vectors: vectors of a norm: 2 with weight and bias (LayerNorm), 1 with a weight (RMSNorm).
        norms: those of a layer over its width, as in ModelConfig; one where attention and MLP share it.
        norms_from_zero: whether norms multiply by 1 + weight, which is 0 at first.
        delta: whether a gated delta net stands in the place of attention; q, k and v are then of its heads, whose
            values are as many as `heads`.
        output_gate: whether a matrix as large as that of the queries makes a gate on attention's output.
        positions: rows of a learned position table, 0 without one.
        embedding_width: width of the embedding's rows where a projection widens them to hidden.
        qk_norm, qk_norm_across: whether each head of q and k is normed, or all heads of each together.
        rotary: whether q and k are rotated.
        experts, experts_per_token: MLPs of `ffn` in a layer, and how many of them a token runs through; 0: one for all.
        shared_ffn: of the MLP beside them, through which all tokens run; 0: there is none.
        shared_gate: whether a matrix with one output makes a gate on what that MLP gives.
        expert_bias: whether the router of the experts has a bias for its choice, which is no parameter.
        extra: parameters of the ends that no other field covers.
        own_layer: the parameters of a custom layer (memo.spec.custom_layer), which no field above describes.
        stack: the shape of each layer, where they are of several kinds; what is said of layers here is then of one.
        nearest: the nearest model that memo can run: the same sizes of all activations and matrices. Exact for the
            families that memo trains; of others the parameters may differ by biases and norms, and layers that run
            attention and MLP side by side are put in sequence.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    norm_vectors: int = 2
    norms: tuple[str, ...] = ("attention_norm", "mlp_norm")
    norms_from_zero: bool = False
    qkv_bias: bool = True
    projection_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False
    qk_norm_across: bool = False
    sinks: bool = False
    delta: bool = False
    output_gate: bool = False
    positions: int = 0
    embedding_width: int | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    head_bias: bool = False
    rotary: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    extra: int = 0
    own_layer: tuple[Weight, ...] = ()
    stack: tuple["ModelShape", ...] = ()
    nearest: ModelConfig = field(kw_only=True, compare=False)

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def fc1_size(self) -> int:
        return self.ffn * (2 if self.gated else 1)

    # The table of parameters, in the order of the model's modules; the model is built from it, and all counts sum it.

    @cached_property
    def layer_weights(self) -> tuple[Weight, ...]:
        """Of one layer, with its adapters."""
        return as_trained(self.nearest, self._layer_weights(), "layers.*.")

    def _layer_weights(self) -> tuple[Weight, ...]:
        """Norms after attention and MLP, where a family has them, stand at the end."""
        if self.own_layer:
            return self.own_layer
        hidden, qkv = self.hidden, (("q", self.q_size), ("k", self.kv_size), ("v", self.kv_size))
        if self.delta:
            qkv = (("delta.q", self.kv_size), ("delta.k", self.kv_size), ("delta.v", self.q_size))
        norms = {name: self._norm(name, hidden) for name in self.norms}
        across = self.qk_norm_across
        sizes = {"q": self.q_size, "k": self.kv_size} if across else dict.fromkeys("qk", self.head_dim)
        heads = [
            self._norm(f"attention.{name}_norm", size, "rows" if across else "whole")
            for name, size in sizes.items()
            if self.qk_norm
        ]
        sinks = (one("attention.sinks", self.heads, None, "rows", "zeros"),) if self.sinks else ()
        logits = (("delta.beta", self.heads), ("delta.decay", self.heads)) if self.delta else ()
        own = "delta." if self.delta else ""
        gate = ((f"{own}gate", self.q_size),)
        return (
            *norms.pop("attention_norm", ()),
            *sinks,
            *(self._delta_net(qkv) if self.delta else ()),
            *_linear("attention", "qkv", qkv + logits, hidden, self.qkv_bias, "rows"),
            *(weight for norm in heads for weight in norm),
            *(_linear("attention", "gate", gate, hidden, self.qkv_bias, "rows") if self.output_gate else ()),
            *_linear(
                "attention", "projection", ((f"{own}projection", hidden),), self.q_size, self.projection_bias, "columns"
            ),
            *norms.pop("mlp_norm", ()),
            *self._mlp(),
            *(weight for norm in norms.values() for weight in norm),
        )

    @property
    def constants(self) -> tuple[Weight, ...]:
        """What a layer has beside its parameters, in fp32 whatever the dtype of these."""
        return (one(EXPERT_BIAS, self.experts, init="zeros"),) if self.expert_bias else ()

    def _delta_net(self, channels: _Parts) -> Iterator[Weight]:
        """Beside its matrices: kernels of a convolution, rates and biases of the decay, and the norm of the output."""
        kernels = tuple((f"attention.{name}.kernels.weight", rows) for name, rows in channels)
        yield Weight("attention.kernels", kernels, TAPS, "rows")
        yield Weight("attention.rates", (("attention.delta.rates", self.heads),), None, "rows", "log_uniform")
        yield Weight("attention.biases", (("attention.delta.biases", self.heads),), None, "rows", "ones")
        norm = (("attention.delta.norm.weight", self.head_dim),)
        yield Weight("attention.gating.weight", norm, None, "whole", "ones")

    def _mlp(self) -> Iterator[Weight]:
        """Of all experts, if there are any, one below the other, behind the matrix of their router."""
        inner: _Parts = self._inner(self.ffn)
        outer: _Parts = (("fc2", self.hidden),)
        bias = self.mlp_bias
        if self.experts:
            yield from _linear("mlp", "router", (("router", self.experts),), self.hidden, bias, "whole")
            names = [f"experts.{index}" for index in range(self.experts)]
            inner, outer = (
                tuple((f"{name}.{part}", rows) for name in names for part, rows in of_one) for of_one in (inner, outer)
            )
        yield from _linear("mlp", "fc1", inner, self.hidden, bias, "rows", self.experts)
        yield from _linear("mlp", "fc2", outer, self.ffn, bias, "columns", self.experts)
        if self.shared_ffn:
            yield from _linear("mlp.shared", "fc1", self._inner(self.shared_ffn), self.hidden, bias, "rows")
            if self.shared_gate:
                yield from _linear("mlp.shared", "score", (("score", 1),), self.hidden, False, "whole")
            yield from _linear("mlp.shared", "fc2", (("fc2", self.hidden),), self.shared_ffn, bias, "columns")

    def _inner(self, size: int) -> _Parts:
        return (("gate", size), ("up", size)) if self.gated else (("fc1", size),)

    @cached_property
    def embedding_weights(self) -> tuple[Weight, ...]:
        """Of what stands before the layers: table of learned positions, table of tokens, widening, norm."""
        width = self.embedding_width or self.hidden
        positions = (one("position_embedding.weight", self.positions, self.hidden),) if self.positions else ()
        widening = () if width == self.hidden else (one(_WIDENING, self.hidden, width),)
        norm = self._norm("embedding_norm", self.hidden) if self.embedding_norm else ()
        table = one("embedding.weight", self.vocab, width, "vocabulary", tied=self.tied)
        return as_trained(self.nearest, (*positions, table, *widening, *norm))

    @cached_property
    def head_weights(self) -> tuple[Weight, ...]:
        """Of what stands after the layers. A tied table is the embedding's, and exists once where both are."""
        name, width = "embedding" if self.tied else "head", self.embedding_width or self.hidden
        bias = (one("head.bias", self.vocab, None, "vocabulary", "zeros"),) if self.head_bias else ()
        norm = self._norm("final_norm", self.hidden) if self.final_norm else ()
        table = one(f"{name}.weight", self.vocab, width, "vocabulary", tied=self.tied)
        return as_trained(self.nearest, (table, *bias, *norm))

    def _norm(self, name: str, size: int, split: Split = "whole") -> tuple[Weight, ...]:
        init: Init = "zeros" if self.norms_from_zero else "ones"
        vectors = (one(f"{name}.weight", size, None, split, init), one(f"{name}.bias", size, None, split, "zeros"))
        return vectors[: self.norm_vectors]

    # Counts of the model without padding, as its checkpoint holds it.

    @property
    def linears(self) -> tuple[int, ...]:
        """Weights of each matrix of one layer as published code holds them: q, k, v, projection, fc1 (one or
        two), fc2; without biases."""
        matrices = (weight for weight in self.layer_weights if weight.columns is not None)
        return tuple(math.prod(shape) for weight in matrices for shape in weight.part_shapes().values())

    @cached_property
    def multiplied(self) -> int:
        """Weights of the matrices of one layer that multiply a token."""
        return sum(map(self._multiplied, self.layer_weights))

    @cached_property
    def multiplied_frozen(self) -> int:
        """Those of them that are not trained."""
        return sum(self._multiplied(weight) for weight in self.layer_weights if weight.frozen)

    def _multiplied(self, weight: Weight) -> int:
        if weight.columns is None:
            return 0
        return weight.numel * self.experts_per_token // weight.experts if weight.experts else weight.numel

    @property
    def of_layers(self) -> tuple["ModelShape", ...]:
        """The shape of each layer."""
        return self.stack or (self,) * self.layers

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: of the experts only those that it runs through."""
        matrices = (w for layer in self.of_layers for w in layer.layer_weights if w.columns is not None)
        idle = sum(weight.numel for weight in matrices) - sum(layer.multiplied for layer in self.of_layers)
        return self.parameters - idle

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters that are not frozen, without `extra`."""
        weights = [w for layer in self.of_layers for w in layer.layer_weights]
        head = (w for w in self.head_weights if not w.tied)
        return sum(w.numel for w in (*weights, *self.embedding_weights, *head) if not w.frozen)

    @cached_property
    def coded_parameters(self) -> int:
        """Parameters of layers that are kept in few bits."""
        return sum(weight.numel for layer in self.of_layers for weight in layer.layer_weights if weight.coded)

    @cached_property
    def layer_split(self) -> int:
        """Parameters of a layer that tensor parallelism divides: matrices, and biases of their outputs' parts."""
        return sum(weight.numel for weight in self.layer_weights if weight.split != "whole")

    @cached_property
    def layer_replicated(self) -> int:
        """Parameters of a layer that each tensor-parallel rank holds in full: norms, biases after a sum."""
        return sum(weight.numel for weight in self.layer_weights if weight.split == "whole")

    @property
    def embedding(self) -> int:
        """The token table, and its projection to hidden where it has one."""
        return sum(w.numel for w in self.embedding_weights if w.name in ("embedding.weight", _WIDENING))

    @property
    def position_table(self) -> int:
        return self.positions * self.hidden

    @property
    def head(self) -> int:
        """0 where the head is the embedding's matrix."""
        return 0 if self.tied else sum(weight.numel for weight in self.head_weights if weight.split == "vocabulary")

    @property
    def end_norms(self) -> int:
        """The norm after the embedding and the one before the head."""
        ends = (*self.embedding_weights, *self.head_weights)
        return sum(weight.numel for weight in ends if weight.columns is None and weight.split == "whole")

    @property
    def parameters(self) -> int:
        layers = sum(layer.layer_split + layer.layer_replicated for layer in self.of_layers)
        return self.embedding + self.position_table + layers + self.end_norms + self.head + self.extra


def _linear(
    module: str, name: str, parts: _Parts, columns: int, bias: bool, split: Split, experts: int = 0
) -> Iterator[Weight]:
    """Matrices in one parameter, and their biases. Split by its columns, the inputs, a matrix has its bias added once
    the parts of all ranks are."""

    def of(kind: str) -> _Parts:
        return tuple((f"{module}.{part}.{kind}", rows) for part, rows in parts)

    yield Weight(f"{module}.{name}.weight", of("weight"), columns, split, experts=experts)
    if bias:
        yield Weight(f"{module}.{name}.bias", of("bias"), None, "rows" if split == "rows" else "whole", "zeros")


@lru_cache(maxsize=256)
def shape_of(model: ModelConfig, name: str, seq_length: int) -> ModelShape:
    """The shape of a model that memo trains; `seq_length` is the length of a learned position table of which
    the configuration names none."""
    learned = model.position_embedding_type == "learned_absolute"
    if len(kinds_of(model)) > 1:
        layers = tuple(shape_of(kind, name, seq_length) for kind in stack_of(model))
        return replace(layers[0], stack=layers, nearest=model)
    (model,) = kinds_of(model)
    return ModelShape(
        name=name,
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.mlp_size,
        vocab=model.vocabulary,
        gated=model.gated,
        tied=not model.untie_embeddings_and_output_weights,
        norm_vectors=2 if model.normalization == "LayerNorm" else 1,
        norms=model.norms,
        norms_from_zero=model.apply_layernorm_1p,
        qkv_bias=model.qkv_bias,
        projection_bias=model.add_bias_linear,
        mlp_bias=model.add_bias_linear,
        qk_norm=model.qk_layernorm,
        qk_norm_across=model.qk_layernorm_across_heads,
        sinks=model.attention_sinks,
        delta=model.is_linear,
        output_gate=model.attention_output_gate,
        positions=(model.max_position_embeddings or seq_length) if learned else 0,
        rotary=not learned,
        experts=model.num_experts,
        experts_per_token=model.moe_router_topk if model.num_experts else 0,
        shared_ffn=model.shared_ffn_size,
        shared_gate=model.shared_is_gated,
        expert_bias=model.num_experts > 0 and model.moe_router_enable_expert_bias,
        own_layer=custom_facts(model).weights if model.custom_layer else (),
        nearest=model,
    )


def adapted_matrices(model: ModelConfig) -> list[str]:
    """Global tensors of all layers beside which there are adapters, in the model's order."""
    found = []
    for index, layer in enumerate(shape_of(model, "", 0).of_layers):
        of_b = {name for weight in layer.layer_weights if is_of_adapter(weight.name) for name, _ in weight.parts}
        names = (name for weight in layer.layer_weights if weight.columns is not None for name, _ in weight.parts)
        found += [f"layers.{index}.{name}" for name in names if adapter_names(name)[1] in of_b]
    return found


def adapted_rows(model: ModelConfig, module: str, tp: int) -> tuple[slice, ...]:
    """Of the outputs of a matrix of a layer, or of one expert's, on a rank of tp, those of each part that has an
    adapter."""
    table = {weight.name: weight for weight in shape_of(model, "", 0).layer_weights}
    matrix, adapted = table[f"{module}.weight"], {name for name, _ in table[f"{module}.adapter.b"].parts}
    share, start, found = tp if matrix.split == "rows" else 1, 0, []
    for name, rows in matrix.parts[: len(matrix.parts) // max(1, matrix.experts)]:
        if adapter_names(name)[1] in adapted:
            found.append(slice(start, start + rows // share))
        start += rows // share
    return tuple(found)


@lru_cache(maxsize=64)
def layer_matrices(model: ModelConfig) -> dict[str, Weight]:
    """The matrices of a layer by the path of their module, in the order of execution; all layers are alike. Those of an
    adapter are behind the matrix that they are beside."""
    weights = shape_of(model, "", 0).layer_weights
    return {weight.name.removesuffix(".weight"): weight for weight in weights if weight.columns is not None}
