"""The shape of a decoder-only transformer as far as estimates need it, with its exact parameters.

    layer      norm, q k v (a + 2 k heads of d), projection, norm, fc1 (f, or 2 f when gated), fc2
    ends       embedding (v x h), positions, embedding norm, final norm, head (v x h unless tied)

`ModelShape` also holds models that memo cannot train (OPT, BLOOM, NeoX, ...); `shape_of` makes one of a
ModelConfig, `memo.estimate.hf_config` of a published config.json. Known error: none in the counts of the
families that are tested; where layers differ from each other (mixture of experts) there is no shape.
"""

from dataclasses import dataclass

from memo.config import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements; counts of parameters follow from them exactly.

    Attributes:
        head_dim: size of one head; heads x head_dim may differ from hidden.
        norm_vectors: vectors of a norm: 2 with weight and bias (LayerNorm), 1 with a weight (RMSNorm).
        norms_per_layer: 2; 1 where attention and MLP share a norm; 4 with norms after them too.
        positions: rows of a learned position table, 0 without one.
        embedding_width: width of the embedding's rows where a projection widens them to hidden.
        rotary: whether q and k are rotated.
        extra: parameters of the ends that no other field covers.
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
    norms_per_layer: int = 2
    qkv_bias: bool = True
    projection_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False
    positions: int = 0
    embedding_width: int | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    head_bias: bool = False
    rotary: bool = False
    extra: int = 0

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def fc1_size(self) -> int:
        return self.ffn * (2 if self.gated else 1)

    @property
    def linears(self) -> tuple[int, ...]:
        """Weights of each matrix of one layer as published code holds them: q, k, v, projection, fc1 (one or
        two), fc2; without biases."""
        attention = (self.hidden * self.q_size, *(self.hidden * self.kv_size,) * 2, self.q_size * self.hidden)
        return (*attention, *(self.hidden * self.ffn,) * (3 if self.gated else 2))

    @property
    def layer_split(self) -> int:
        """Parameters of a layer that tensor parallelism divides: matrices, and biases of their outputs' parts."""
        biases = (self.q_size + 2 * self.kv_size) * self.qkv_bias + self.fc1_size * self.mlp_bias
        return sum(self.linears) + biases

    @property
    def layer_replicated(self) -> int:
        """Parameters of a layer that each tensor-parallel rank holds in full: norms, biases after a sum."""
        norms = self.norm_vectors * self.hidden * self.norms_per_layer
        heads = 2 * self.norm_vectors * self.head_dim * self.qk_norm
        return norms + heads + self.hidden * (self.projection_bias + self.mlp_bias)

    @property
    def embedding(self) -> int:
        """The token table without padding, and its projection to hidden where it has one."""
        width = self.embedding_width or self.hidden
        return self.vocab * width + (0 if width == self.hidden else width * self.hidden)

    @property
    def position_table(self) -> int:
        return self.positions * self.hidden

    @property
    def head(self) -> int:
        """0 where the head is the embedding's matrix."""
        return 0 if self.tied else self.vocab * ((self.embedding_width or self.hidden) + self.head_bias)

    @property
    def end_norms(self) -> int:
        """The norm after the embedding and the one before the head."""
        return self.norm_vectors * self.hidden * (self.embedding_norm + self.final_norm)

    @property
    def parameters(self) -> int:
        """All of the model, as its checkpoint holds them."""
        layers = self.layers * (self.layer_split + self.layer_replicated)
        return self.embedding + self.position_table + layers + self.end_norms + self.head + self.extra


def shape_of(model: ModelConfig, name: str, seq_length: int) -> ModelShape:
    """The shape of a model that memo trains; `seq_length` is the length of a learned position table of which
    the configuration names none."""
    learned = model.position_embedding_type == "learned_absolute"
    return ModelShape(
        name=name,
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn_size,
        vocab=model.vocabulary,
        gated=model.gated,
        tied=not model.untie_embeddings_and_output_weights,
        norm_vectors=2 if model.normalization == "LayerNorm" else 1,
        qkv_bias=model.qkv_bias,
        projection_bias=model.add_bias_linear,
        mlp_bias=model.add_bias_linear,
        qk_norm=model.qk_layernorm,
        positions=(model.max_position_embeddings or seq_length) if learned else 0,
        rotary=not learned,
    )


def model_config_of(shape: ModelShape) -> ModelConfig:
    """The nearest model that memo can run: the same sizes of all activations and matrices.

    Exact for GPT-2, Llama, Mistral, Qwen2 and Qwen3; of others the parameters may differ by biases and norms
    (take those from the shape), and layers that run attention and MLP side by side are put in sequence.
    """
    return ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        vocab_size=shape.vocab,
        normalization="LayerNorm" if shape.norm_vectors == 2 else "RMSNorm",
        activation="swiglu" if shape.gated else "gelu",
        position_embedding_type="rope" if shape.rotary else "learned_absolute",
        max_position_embeddings=shape.positions or None,
        add_bias_linear=shape.projection_bias and shape.mlp_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        untie_embeddings_and_output_weights=not shape.tied,
    )
