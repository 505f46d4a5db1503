"""The shape of a decoder-only transformer, and the table of its parameters.

    layer      norm, q k v (a + 2 k heads of d), projection, norm, fc1 (f, or 2 f when gated), fc2
               with experts a router, and fc1 and fc2 of each expert, in the place of the last two
    ends       embedding (v x h), positions, embedding norm, final norm, head (v x h unless tied)

`ModelShape` also describes models that memo cannot train (OPT, BLOOM, NeoX, ...). `shape_of` makes one from a
ModelConfig, `memo.estimate.hf_config` from a published config.json, whose families are a table in
memo/config/hugging_face_families.py. Known error: none in the counts of the families that are tested. Where layers are
of several kinds (memo.spec.stack), each kind has a shape of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from memo.config import ModelConfig
from memo.spec.custom_layer import custom_facts
from memo.spec.delta import TAPS
from memo.spec.lora import adapter_names, as_trained
from memo.spec.stack import kinds_of, stack_of
from memo.spec.weights import Init, Split, Weight, is_of_adapter, one

_WIDENING = "embedding_projection.weight"
EXPERT_BIAS = "mlp.router.expert_bias"
"""The tensor that the router of a layer adds to scores where it chooses experts."""
LAYER_SCALAR = "scalar"
_Parts = tuple[tuple[str, int], ...]
"""Names of tensors, and their numbers of rows."""


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, from which its parameters are counted exactly.

    Attributes:
        nearest: the nearest model that memo can run, with the same sizes of all activations and matrices. Exact for the
            families that memo trains. For other families the fields below say where parameters differ, and layers that
            run attention and MLP side by side are put in sequence.
        norm_vectors: vectors of a norm: 2 with weight and bias (LayerNorm), 1 with a weight (RMSNorm).
        norms: norms of a layer over its width, as in ModelConfig; a single one where attention and MLP share it.
        positions: rows of a learned position table, 0 without one.
        embedding_width: width of the embedding's rows where a projection widens them to the hidden size.
        extra: parameters of the ends that no other field covers.
        stack: the shape of each layer, where they are of several kinds.
    """

    name: str
    nearest: ModelConfig
    norm_vectors: int
    norms: tuple[str, ...]
    qkv_bias: bool
    projection_bias: bool
    mlp_bias: bool
    positions: int = 0
    embedding_width: int | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    head_bias: bool = False
    extra: int = 0
    stack: tuple["ModelShape", ...] = ()

    @property
    def tied(self) -> bool:
        return not self.nearest.untie_embeddings_and_output_weights

    @property
    def q_size(self) -> int:
        return self.nearest.num_attention_heads * self.nearest.head_dim

    @property
    def kv_size(self) -> int:
        return self.nearest.kv_heads * self.nearest.head_dim

    @property
    def fc1_size(self) -> int:
        return self.nearest.mlp_size * (2 if self.nearest.gated else 1)

    # The table of parameters, in the order of the model's modules: the model is built from it, and all counts sum it.

    @cached_property
    def layer_weights(self) -> tuple[Weight, ...]:
        """Parameters of one layer, the first of a stack, with its adapters."""
        if self.stack:
            return self.stack[0].layer_weights
        return as_trained(self.nearest, self._layer_weights(), "layers.*.")

    def _layer_weights(self) -> tuple[Weight, ...]:
        """Parameters without adapters. Norms of the outputs of attention and MLP, where a family has them, stand at the
        end."""
        model, hidden, across = self.nearest, self.nearest.hidden_size, self.nearest.qk_layernorm_across_heads
        if model.custom_layer:
            return custom_facts(model).weights
        q, kv, own = self.q_size, self.kv_size, "delta." if model.is_linear else ""
        qkv: _Parts = (("q", q), ("k", kv), ("v", kv))[: 2 if model.full_keys_as_values else 3]
        if own:  # a delta net has one head of values for each of its heads
            qkv = (("delta.q", kv), ("delta.k", kv), ("delta.v", q))
        norms = {name: self._norm(name, hidden) for name in self.norms}
        if "router_norm" in norms:
            norms["router_norm"] = (norms["router_norm"][0]._replace(parts=(("mlp.router.norm", hidden),)),)
        sizes = {"q": q, "k": kv} if across else dict.fromkeys("qk", model.head_dim)
        heads = [
            self._norm(f"attention.{name}_norm", size, "rows" if across else "whole")
            for name, size in sizes.items()
            if model.qk_layernorm
        ]
        logits = tuple((f"delta.{name}", model.num_attention_heads) for name in ("beta", "decay") if own)
        projection, gate = ((f"{own}projection", hidden),), ((f"{own}gate", q),)
        attended = model.num_attention_heads * model.value_dim
        sinks = one("attention.sinks", model.num_attention_heads, None, "rows", "zeros")
        return (
            *norms.pop("attention_norm", ()),
            *((sinks,) if model.attention_sinks else ()),
            *(self._delta_net(qkv) if own else ()),
            *(
                self._latent()
                if model.multi_latent_attention
                else _linear("attention", "qkv", qkv + logits, hidden, self.qkv_bias, "rows")
            ),
            *(weight for norm in heads for weight in norm),
            *(_linear("attention", "gate", gate, hidden, self.qkv_bias, "rows") if model.attention_output_gate else ()),
            *_linear("attention", "projection", projection, attended, self.projection_bias, "columns"),
            *norms.pop("mlp_norm", ()),
            *self._mlp(),
            *(weight for norm in norms.values() for weight in norm),
        )

    @property
    def constants(self) -> tuple[Weight, ...]:
        """Tensors of a layer beside its parameters, in fp32 whatever the dtype of the parameters."""
        has_bias = self.nearest.num_experts > 0 and self.nearest.moe_router_enable_expert_bias
        found = [one(EXPERT_BIAS, self.nearest.num_experts, init="zeros")] * has_bias
        return (*found, *[one(LAYER_SCALAR, 1, init="ones")] * self.nearest.layer_scalar)

    def _latent(self) -> Iterator[Weight]:
        """Parameters that make queries, keys and values from latents (memo.model.latent), which every rank of tp has.

        Behind the latent of keys and values stand the rotated channels of keys, which all heads share."""
        model, hidden, heads = self.nearest, self.nearest.hidden_size, self.nearest.num_attention_heads
        of_kv: _Parts = (("kv_down", model.kv_lora_rank + model.qk_pos_emb_head_dim),)
        of_q: _Parts = (("q_down", model.q_lora_rank),) if model.q_lora_rank else ()
        yield from _linear("attention", "latent", of_q + of_kv, hidden, False, "whole")
        if model.q_lora_rank:
            yield from self._norm("attention.latent_norm.q", model.q_lora_rank)
        yield from self._norm("attention.latent_norm.kv", model.kv_lora_rank)
        q: _Parts = (("q_up" if model.q_lora_rank else "q", self.q_size),)
        yield from _linear("attention", "q", q, model.q_lora_rank or hidden, False, "rows")
        kv: _Parts = (("kv_up", heads * (model.qk_head_dim + model.v_head_dim)),)
        yield from _linear("attention", "kv", kv, model.kv_lora_rank, False, "rows")

    def _delta_net(self, channels: _Parts) -> Iterator[Weight]:
        """Parameters of a delta net besides its matrices: kernels of a convolution, rates and biases of the decay, and
        the norm of the output."""
        heads = self.nearest.num_attention_heads
        kernels = tuple((f"attention.{name}.kernels.weight", rows) for name, rows in channels)
        yield Weight("attention.kernels", kernels, TAPS, "rows")
        yield Weight("attention.rates", (("attention.delta.rates", heads),), None, "rows", "log_uniform")
        yield Weight("attention.biases", (("attention.delta.biases", heads),), None, "rows", "ones")
        norm = (("attention.delta.norm.weight", self.nearest.head_dim),)
        yield Weight("attention.gating.weight", norm, None, "whole", "ones")

    def _mlp(self) -> Iterator[Weight]:
        """Parameters of the MLP, or of a router and then of all experts, whose matrices stand one below the other."""
        model, hidden, bias = self.nearest, self.nearest.hidden_size, self.mlp_bias

        def inner(size: int) -> _Parts:
            return (("gate", size), ("up", size)) if model.gated else (("fc1", size),)

        of_mlp, names = (inner(model.mlp_size), (("fc2", hidden),)), [""]
        if model.num_experts:
            yield from _linear("mlp", "router", (("router", model.num_experts),), hidden, bias, "whole")
            if model.moe_separate_norms:
                yield one("mlp.router.scale", model.num_experts, init="ones")
            names = [f"experts.{index}." for index in range(model.num_experts)]
        fc1, fc2 = (tuple((name + part, rows) for name in names for part, rows in parts) for parts in of_mlp)
        yield from _linear("mlp", "fc1", fc1, hidden, bias, "rows", model.num_experts)
        yield from _linear("mlp", "fc2", fc2, model.mlp_size, bias, "columns", model.num_experts)
        if shared := model.shared_ffn_size:
            yield from _linear("mlp.shared", "fc1", inner(shared), hidden, bias, "rows")
            if model.shared_is_gated:
                yield from _linear("mlp.shared", "score", (("score", 1),), hidden, False, "whole")
            yield from _linear("mlp.shared", "fc2", (("fc2", hidden),), shared, bias, "columns")

    @cached_property
    def embedding_weights(self) -> tuple[Weight, ...]:
        """Parameters before the layers: table of learned positions, table of tokens, projection to the hidden size,
        norm."""
        hidden = self.nearest.hidden_size
        width = self.embedding_width or hidden
        positions = (one("position_embedding.weight", self.positions, hidden),) if self.positions else ()
        widening = () if width == hidden else (one(_WIDENING, hidden, width),)
        norm = self._norm("embedding_norm", hidden) if self.embedding_norm else ()
        table = one("embedding.weight", self.nearest.vocabulary, width, "vocabulary", tied=self.tied)
        return as_trained(self.nearest, (*positions, table, *widening, *norm))

    @cached_property
    def head_weights(self) -> tuple[Weight, ...]:
        """Parameters after the layers. A tied table is the embedding's, and exists once where a stage has both ends."""
        name, width = "embedding" if self.tied else "head", self.embedding_width or self.nearest.hidden_size
        bias = (one("head.bias", self.nearest.vocabulary, None, "vocabulary", "zeros"),) if self.head_bias else ()
        norm = self._norm("final_norm", self.nearest.hidden_size) if self.final_norm else ()
        table = one(f"{name}.weight", self.nearest.vocabulary, width, "vocabulary", tied=self.tied)
        return as_trained(self.nearest, (table, *bias, *norm))

    def _norm(self, name: str, size: int, split: Split = "whole") -> tuple[Weight, ...]:
        init: Init = "zeros" if self.nearest.apply_layernorm_1p else "ones"
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
        """Weights of the matrices of one layer that multiply a token and are not trained."""
        return sum(self._multiplied(weight) for weight in self.layer_weights if weight.frozen)

    def _multiplied(self, weight: Weight) -> int:
        if weight.columns is None:
            return 0
        return weight.numel * self.nearest.moe_router_topk // weight.experts if weight.experts else weight.numel

    @property
    def of_layers(self) -> tuple["ModelShape", ...]:
        """The shape of each layer."""
        return self.stack or (self,) * self.nearest.num_layers

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: with experts only those that it runs through."""
        matrices = (w for layer in self.of_layers for w in layer.layer_weights if w.columns is not None)
        idle = sum(weight.numel for weight in matrices) - sum(layer.multiplied for layer in self.of_layers)
        return self.parameters - idle

    @cached_property
    def _all_weights(self) -> list[Weight]:
        """Parameters of the whole model; a tied table once."""
        layers = (weight for layer in self.of_layers for weight in layer.layer_weights)
        return [*self.embedding_weights, *layers, *(weight for weight in self.head_weights if not weight.tied)]

    @cached_property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self._all_weights) + self.extra

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters that are not frozen, without `extra`."""
        return sum(weight.numel for weight in self._all_weights if not weight.frozen)

    @cached_property
    def coded_parameters(self) -> int:
        """Parameters of layers that are stored in few bits."""
        return sum(weight.numel for weight in self._all_weights if weight.coded)

    @cached_property
    def layer_split(self) -> int:
        """Parameters of a layer that tensor parallelism divides: matrices, and the biases of matrices that are split by
        rows."""
        return sum(weight.numel for weight in self.layer_weights if weight.split != "whole")

    @cached_property
    def layer_replicated(self) -> int:
        """Parameters of a layer that each tensor-parallel rank holds in full: norms, and biases that are added after a
        sum."""
        return sum(weight.numel for weight in self.layer_weights if weight.split == "whole")

    @property
    def embedding(self) -> int:
        """Parameters of the token table, and of its projection to the hidden size if there is one."""
        return sum(w.numel for w in self.embedding_weights if w.name in ("embedding.weight", _WIDENING))

    @property
    def head(self) -> int:
        """Parameters of the head's matrix; 0 where it is the embedding's."""
        return 0 if self.tied else sum(weight.numel for weight in self.head_weights if weight.split == "vocabulary")


def _linear(
    module: str, name: str, parts: _Parts, columns: int, bias: bool, split: Split, experts: int = 0
) -> Iterator[Weight]:
    """One parameter of matrices, and one of their biases. The bias of a matrix that is split by columns, its inputs, is
    added once the ranks' outputs are summed."""

    def of(kind: str) -> _Parts:
        return tuple((f"{module}.{part}.{kind}", rows) for part, rows in parts)

    yield Weight(f"{module}.{name}.weight", of("weight"), columns, split, experts=experts)
    if bias:
        yield Weight(f"{module}.{name}.bias", of("bias"), None, "rows" if split == "rows" else "whole", "zeros")


@lru_cache(maxsize=256)
def shape_of(model: ModelConfig, name: str, seq_length: int) -> ModelShape:
    """The shape of a model that memo trains; `seq_length` is the length of a learned position table if the
    configuration names none."""
    stack = tuple(shape_of(kind, name, seq_length) for kind in stack_of(model)) if len(kinds_of(model)) > 1 else ()
    return ModelShape(
        name=name,
        nearest=model if stack else kinds_of(model)[0],
        norm_vectors=2 if model.normalization == "LayerNorm" else 1,
        norms=model.norms,
        qkv_bias=model.qkv_bias,
        projection_bias=model.add_bias_linear,
        mlp_bias=model.add_bias_linear,
        positions=model.position_rows(seq_length),
        stack=stack,
    )


def adapted_matrices(model: ModelConfig) -> list[str]:
    """Global tensors of all layers that have an adapter, in the model's order."""
    found = []
    for index, layer in enumerate(shape_of(model, "", 0).of_layers):
        of_b = {name for weight in layer.layer_weights if is_of_adapter(weight.name) for name, _ in weight.parts}
        names = (name for weight in layer.layer_weights if weight.columns is not None for name, _ in weight.parts)
        found += [f"layers.{index}.{name}" for name in names if adapter_names(name)[1] in of_b]
    return found


def adapted_rows(model: ModelConfig, module: str, tp: int) -> tuple[slice, ...]:
    """Ranges of rows of a layer's matrix on a rank of tp, or of one expert's matrix: those of each part that has an
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
    """{path of the module: matrix} of a layer, in the order of execution; all layers are alike. The matrices of an
    adapter stand behind the matrix to which the adapter belongs."""
    weights = shape_of(model, "", 0).layer_weights
    return {weight.name.removesuffix(".weight"): weight for weight in weights if weight.columns is not None}
