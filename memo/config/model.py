"""The shape of the model. Field names are Megatron's; a flag is the name with dashes.

Its ranges hold for flags, for config.json of Hugging Face and for estimates alike. The largest numbers are far above
any model that was built (the largest public ones have 126 layers and 18,432 channels), and small enough that no sum or
loop over them overflows or takes for ever.
"""

import math
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Annotated, Literal

from memo.artifacts.fields import in_range
from memo.config import model_marks as of
from memo.config.flag import LARGEST, TOKENS, Flag, ReadWith
from memo.config.layer_words import FACTORS, LAYER_FREQ, LAYER_TYPES, LINEAR, TARGETS, marked

PositionEmbedding = Literal["rope", "learned_absolute", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
Activation = Literal["gelu", "gelu_tanh", "swiglu", "swiglu_clamped", "geglu_tanh"]
NormPlacement = Literal["before", "around", "after"]
RopeScaling = Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"]
ScoreFunction = Literal["softmax", "sigmoid"]
Quantization = Literal["none", "nf4", "int8"]

CHOICES_OF_TRAINED = ("freeze", "train_only", "lora_rank", "lora_target_modules", "quantize")
"""Fields with which a plan says what is trained; the other fields of LoRA change no size."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: the GPT of the MEMO paper or the Llama family."""

    num_layers: Annotated[int, in_range(1, 1 << 16)] = 4
    """Transformer layers."""
    hidden_size: Annotated[int, in_range(1, 1 << 24)] = 128
    """Width h of the residual stream."""
    num_attention_heads: Annotated[int, in_range(1, 1 << 16)] = 4
    """Query heads."""
    num_query_groups: Annotated[int | None, in_range(1, 1 << 16)] = None
    """Key/value heads (GQA); default: one per query head."""
    kv_channels: Annotated[int | None, in_range(1, 1 << 16)] = None
    """Size of one head; default: hidden-size / num-attention-heads."""
    ffn_hidden_size: Annotated[int | None, in_range(1, 1 << 26)] = None
    """Inner width of the MLP; default: 4 x hidden-size."""
    vocab_size: Annotated[int | None, in_range(1, 1 << 28)] = None
    """Tokens in the vocabulary; default: the tokenizer's."""
    normalization: Normalization = "LayerNorm"
    """Norm before attention, before the MLP and at the end."""
    norm_epsilon: Annotated[float, Flag(aliases=("layernorm_epsilon",)), in_range(above=0, high=1)] = 1e-5
    """Added to the variance inside every norm."""
    norm_placement: NormPlacement = "before"
    """before: norms of the inputs of attention and MLP; after: norms of their outputs, before the sum with the
    residual; around: both."""
    apply_layernorm_1p: Annotated[bool, of.RMS] = False
    """Norms multiply by 1 + weight, so that their weights are around 0 (Gemma)."""
    activation: Activation = "gelu"
    """gelu (exact erf), gelu_tanh (GPT-2's), swiglu (gated; two input projections), swiglu_clamped (gpt-oss's) or
    geglu_tanh (gated by gelu_tanh)."""
    position_embedding_type: PositionEmbedding = "rope"
    """Rotary, a learned table of max-position-embeddings rows, or none."""
    max_position_embeddings: Annotated[int | None, TOKENS, in_range(1, LARGEST)] = None
    """Rows of the learned table, and the length a RoPE model was made for; default: seq-length."""
    rotary_base: Annotated[float, in_range(above=0, high=10**15), of.ROTATED] = 10000.0
    """RoPE's theta."""
    rotary_percent: Annotated[float, in_range(above=0, high=1), of.ROTATED] = 1.0
    """Share of the channels of each head that are rotated: the first ones (GLM's 0.5), or those that turn fastest where
    rope-scaling-type is proportional (Gemma 4's 0.25)."""
    sliding_rotary_base: Annotated[float, in_range(0, 10**15), of.ROTATED, of.BY_LAYER] = 0.0
    """RoPE's theta in the sliding layers of layer-types, whose frequencies are then not stretched; 0: rotate them as
    all others."""
    no_rope_freq: Annotated[str, LAYER_FREQ, of.ROTATED] = ""
    """Layers without RoPE, as a sum of lists: 1 for a layer without it, 0 for one with it, such as [0,0,0,1]*9
    (SmolLM3). Default: all layers have it."""
    rope_scaling_type: Annotated[RopeScaling, of.ROTATED] = "none"
    """How RoPE frequencies are stretched for longer sequences; proportional: not at all (see --rotary-percent)."""
    rope_scaling_factor: Annotated[float, in_range(1, 10**9), of.STRETCHED] = 1.0
    """New length / old length."""
    rope_original_max_position_embeddings: Annotated[int, TOKENS, in_range(1, LARGEST), of.FROM_LENGTH] = 8192
    """The length before stretching."""
    rope_low_freq_factor: Annotated[float, of.FACTOR, of.LLAMA3] = 1.0
    """Wavelengths above the original length / this are stretched in full."""
    rope_high_freq_factor: Annotated[float, of.FACTOR, of.LLAMA3] = 4.0
    """Wavelengths below the original length / this stay as they are."""
    rope_beta_fast: Annotated[float, of.FACTOR, of.YARN] = 32.0
    """Dimensions that turn more often than this within the original length stay as they are."""
    rope_beta_slow: Annotated[float, of.FACTOR, of.YARN] = 1.0
    """Dimensions that turn less often than this within the original length are stretched in full."""
    rope_truncate: Annotated[bool, of.YARN] = True
    """Round the borders that --rope-beta-fast and --rope-beta-slow set to whole dimensions."""
    rope_short_factor: Annotated[str, FACTORS, of.LONGROPE] = ""
    """A number for each pair of rotated channels, with commas between, by which its frequency is divided where
    --seq-length is no more than --rope-original-max-position-embeddings."""
    rope_long_factor: Annotated[str, FACTORS, of.LONGROPE] = ""
    """The same for longer sequences."""
    rope_attention_factor: Annotated[float, in_range(0, 100), of.SCALED] = 0.0
    """Factor on the cosines and sines; 0: that of YaRN's paper, 0.1 ln(rope-scaling-factor) + 1, or of LongRoPE's."""
    mscale_all_dim: Annotated[float, in_range(0, 100), of.YARN] = 0.0
    """Attention scores are multiplied by the square of 1 + 0.1 x this x ln(rope-scaling-factor) (DeepSeek); 0: they are
    not."""
    rope_llama_4_scaling_beta: Annotated[float, in_range(0, 100), of.YARN] = 0.0
    """The query of position p is multiplied by 1 + this x ln(1 + floor(p / rope-original-max-position-embeddings))
    (Ministral 3, Mistral Small 4); 0: it is not."""
    add_bias_linear: bool = False
    """Biases on every linear layer (GPT-2)."""
    add_qkv_bias: bool = False
    """Biases on the q, k and v projections alone (Qwen2)."""
    qk_layernorm: bool = False
    """Norm of every q and k head before RoPE (Qwen3)."""
    qk_layernorm_across_heads: Annotated[bool, ReadWith("qk_layernorm"), of.RMS] = False
    """Norm all heads of q together, and all heads of k (OLMo 2 and 3). Ranks of tensor parallelism add up the squares
    of their heads, in one small message."""
    v_layernorm: Annotated[bool, ReadWith("qk_layernorm"), of.RMS] = False
    """Norm every v head as well, without weights (Gemma 4)."""
    multi_latent_attention: bool = False
    """Make queries, keys and values from narrow latents of each token (DeepSeek's MLA). The channels of positions of a
    query come last in its matrix, in pairs that RoPE turns; those of keys are one for all heads."""
    q_lora_rank: Annotated[int | None, in_range(1, 1 << 24), of.LATENT] = None
    """Width of the latent of queries; default: a matrix makes queries from the hidden state, without a latent."""
    kv_lora_rank: Annotated[int, in_range(1, 1 << 24), of.LATENT] = 512
    """Width of the latent of keys and values."""
    qk_head_dim: Annotated[int, in_range(1, 1 << 16), of.LATENT] = 128
    """Channels of a head of queries and keys that are not rotated."""
    qk_pos_emb_head_dim: Annotated[int, in_range(2, 1 << 16), of.LATENT] = 64
    """Channels of a head of queries and keys that are rotated."""
    v_head_dim: Annotated[int, in_range(1, 1 << 16), of.LATENT] = 128
    """Channels of a head of values, at most as many as of a head of queries; kernels of attention see as many, with
    zeros behind."""
    window_size: Annotated[int, TOKENS, in_range(0, LARGEST)] = 0
    """Sliding window: tokens that a token attends to, the last ones of its document, itself included (Megatron-LM's
    pair (N - 1, 0)); 0: all."""
    layer_types: Annotated[str, LAYER_TYPES] = ""
    """Kinds of layers, repeated over all layers, such as linear,linear,linear,full. sliding: attention with the window;
    full: attention to all tokens; linear: a gated delta net in the place of attention. Default: all have the window."""
    full_num_query_groups: Annotated[int, in_range(0, 1 << 16), of.BY_LAYER] = 0
    """Key/value heads in full layers of layer-types (Gemma 4's 4); 0: as many as in all others."""
    full_kv_channels: Annotated[int, in_range(0, 1 << 16), of.BY_LAYER] = 0
    """Size of one head in full layers of layer-types (Gemma 4's 512); 0: as in all others."""
    full_keys_as_values: Annotated[bool, of.BY_LAYER] = False
    """Full layers of layer-types have no matrix of values: the values are the keys before norm and RoPE (Gemma 4)."""
    linear_num_key_heads: Annotated[int, in_range(0, 1 << 16), of.DELTA_NET] = 0
    """Heads of queries and keys in linear layers of layer-types."""
    linear_num_value_heads: Annotated[int, in_range(0, 1 << 16), of.DELTA_NET] = 0
    """Heads of values in linear layers; each head of keys serves an equal number of them."""
    linear_key_head_dim: Annotated[int, in_range(1, 1 << 16), of.DELTA_NET] = 128
    """Size of a head of queries, keys and values in linear layers."""
    query_pre_attn_scalar: Annotated[int, in_range(0, 1 << 16)] = 0
    """Attention scores are divided by its square root; 0: by the square root of the size of a head."""
    attn_logit_softcapping: Annotated[float, in_range(0, 10**9)] = 0.0
    """Cap of attention scores: this times tanh(score / this), before the softmax (Gemma 2's 50); 0: no cap."""
    attention_sinks: bool = False
    """Add a learned logit to the softmax of each query head; it is zero at first and has no value vector (gpt-oss)."""
    attention_output_gate: bool = False
    """Multiply attention's output by the sigmoid of a gate of the same width, which a matrix makes of the input of the
    queries (Qwen3-Next)."""
    num_experts: Annotated[int, in_range(0, 1 << 16)] = 0
    """Mixture of experts: MLPs of each layer; a token runs through a few of them. 0: one MLP for all tokens."""
    moe_ffn_hidden_size: Annotated[int | None, in_range(1, 1 << 26), of.ROUTED] = None
    """Inner width of each expert; default: ffn-hidden-size."""
    moe_layer_freq: Annotated[str, LAYER_FREQ, of.ROUTED] = ""
    """Layers with experts, as a sum of lists: 1 for a layer with experts, 0 for one with a single MLP of
    ffn-hidden-size, such as [0]*3+[1]*43. Default: all layers have experts."""
    moe_shared_expert_intermediate_size: Annotated[int, in_range(0, 1 << 26), of.ROUTED] = 0
    """Inner width of the shared experts, an MLP that all tokens run through besides their routed experts; 0: none."""
    moe_shared_expert_gate: Annotated[bool, of.SHARED] = False
    """Multiply the output of the shared experts by the sigmoid of one score a token, which a matrix makes
    (Qwen3-Next)."""
    moe_separate_norms: Annotated[bool, of.SHARED] = False
    """The router and its experts have norms of their own for their inputs, and so have the outputs of these and of the
    shared experts; a learned factor of each expert multiplies its weights (Gemma 4's 26B-A4B)."""
    moe_router_topk: Annotated[int, in_range(1, 1 << 16), of.ROUTED] = 2
    """Experts that a token runs through: those with the highest scores of the router."""
    moe_router_pre_softmax: Annotated[bool, of.ROUTED] = False
    """Weight the experts of a token by their softmax over all experts; off: over the experts of this token. With
    sigmoid scores: weight by the scores, which do not sum to 1; off: by their shares, which do."""
    moe_router_score_function: Annotated[ScoreFunction, of.ROUTED] = "softmax"
    """Scores of the router: the softmax of its logits over all experts, or the sigmoid of each logit (GLM-4.5)."""
    moe_router_enable_expert_bias: Annotated[bool, of.SIGMOID] = False
    """Choose experts by score + a bias of each expert. No gradient changes the bias; --moe-router-bias-update-rate
    does."""
    moe_router_num_groups: Annotated[int, in_range(1, 1 << 16), of.SIGMOID] = 1
    """Groups of equal numbers of experts; a token may use experts of its best moe-router-group-topk groups."""
    moe_router_group_topk: Annotated[int, in_range(1, 1 << 16), of.SIGMOID] = 1
    """Groups whose experts a token may use: those whose two best experts have the highest sums of scores."""
    moe_router_topk_scaling_factor: Annotated[float, in_range(above=0, high=10**9), of.SIGMOID] = 1.0
    """Factor on the weights of a token's experts (GLM-4.5's 2.5)."""
    freeze: str = ""
    """Parameters that training leaves as they are: patterns of their names with commas between, where * stands for any
    letters, such as embedding.weight,layers.[0-7].*. They take no memory for gradients, masters or moments."""
    train_only: str = ""
    """Parameters that are trained besides LoRA's adapters, as patterns like those of --freeze; all others are
    frozen."""
    lora_rank: Annotated[int, in_range(0, 1 << 16)] = 0
    """LoRA: freeze the model, and train two matrices of this rank beside each of lora-target-modules; 0: no LoRA."""
    lora_alpha: Annotated[float, in_range(0, 10**9), of.LORA] = 0.0
    """The output of the adapters is multiplied by lora-alpha / lora-rank; 0: lora-rank, which makes the factor 1."""
    lora_use_rslora: Annotated[bool, of.LORA] = False
    """Multiply the output of the adapters by lora-alpha / the square root of lora-rank instead (rank-stabilised
    LoRA)."""
    lora_target_modules: Annotated[str, TARGETS, of.LORA] = "all-linear"
    """Matrices with adapters: all-linear, which is all matrices of layers but routers, or some of these names with
    commas between. Each expert has adapters of its own."""
    quantize: Quantization = "none"
    """Format in which the frozen matrices of layers are stored; they are dequantised for each layer that runs. nf4
    takes 4.5 bits a number (QLoRA), int8 8.5."""
    final_logit_softcapping: Annotated[float, in_range(0, 10**9)] = 0.0
    """Cap of the logits of the vocabulary: this times tanh(logit / this) (Gemma 2's 30); 0: no cap."""
    layer_scalar: bool = False
    """Multiply the output of each layer by a number of its own, which training leaves as it is (Gemma 4)."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of hidden-size; this factor is rounded to the model's dtype."""
    untie_embeddings_and_output_weights: bool = False
    """Give the head a matrix of its own instead of the embedding's."""
    init_method_std: Annotated[float, in_range(above=0, high=1000)] = 0.02
    """Standard deviation of the initial weights; for output projections it is divided by the square root of 2 x
    num-layers."""
    custom_layer: str = ""
    """A layer of your own in the place of memo's, FILE.py:CLASS or MODULE:CLASS (docs/custom_model.md). It may read any
    of the fields above; the numbers and the size of heads must be those of its attention."""

    @property
    def head_dim(self) -> int:
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Channels of a head of attention's output that its projection reads."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def latents(self) -> tuple[int, int, int]:
        """Widths of the latents of queries (0: none), of keys and values, and of the rotated channels of keys."""
        return self.q_lora_rank or 0, self.kv_lora_rank, self.qk_pos_emb_head_dim

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of hidden states that a layer has, by name."""
        return of.NORMS[self.norm_placement] + (of.OF_EXPERTS if self.moe_separate_norms else ())

    @property
    def rotation(self) -> tuple[float, str, int] | None:
        """Theta, scaling and channels of RoPE, by which the angles of one kind of layer differ from those of another
        kind; None without RoPE, and in gated delta nets."""
        rotates = self.position_embedding_type == "rope" and not self.is_linear
        return (self.rotary_base, self.rope_scaling_type, self.rotary_dim) if rotates else None

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def kv_parts(self) -> int:
        """The most parts into which the key/value heads of each layer divide evenly."""
        return math.gcd(self.kv_heads, self.full_num_query_groups)

    @property
    def of_full_layers(self) -> "ModelConfig":
        """The model whose layers are all as the full ones of this one."""
        groups, size = self.full_num_query_groups or self.num_query_groups, self.full_kv_channels or self.kv_channels
        alike = replace(self, layer_types="", window_size=0, full_num_query_groups=0, full_kv_channels=0)
        return replace(alike, num_query_groups=groups, kv_channels=size)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated, some of them by no angle where the scaling is proportional."""
        return self.head_dim if self.rope_scaling_type == "proportional" else self.turned_dim

    @property
    def turned_dim(self) -> int:
        """Channels of a head whose angles grow with the position."""
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else int(self.head_dim * self.rotary_percent)

    def position_rows(self, seq_length: int) -> int:
        """Rows of the learned position table; 0 for RoPE."""
        is_learned = self.position_embedding_type == "learned_absolute"
        return (self.max_position_embeddings or seq_length) if is_learned else 0

    def window(self, seq_length: int) -> int | None:
        """Tokens of the sliding window; None if it leaves out nothing of a sequence of `seq_length` tokens.

        All layers must be of one kind; memo.spec.stack makes a model of each kind of layer.
        """
        is_kind = not self.layer_types or self.is_linear
        assert is_kind, "layers are of several kinds: ask for one of them (memo.spec.stack)"
        return self.window_size if 0 < self.window_size < seq_length else None

    @property
    def is_linear(self) -> bool:
        """Whether all layers are gated delta nets; heads are then those of the nets (memo.spec.stack)."""
        return self.layer_types == LINEAR

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        """The word of layer_types for each layer."""
        return tuple(islice(cycle(self.layer_types.split(",")), self.num_layers))

    @property
    def layers_with_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return marked(self.moe_layer_freq) or (self.num_experts > 0,) * self.num_layers

    @property
    def layers_without_rope(self) -> tuple[bool, ...]:
        """Whether no_rope_freq leaves out the RoPE of each layer."""
        return marked(self.no_rope_freq) or (False,) * self.num_layers

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP of a layer without experts."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def mlp_size(self) -> int:
        """Inner width of the MLP, or of each expert."""
        return (self.num_experts and self.moe_ffn_hidden_size) or self.ffn_size

    @property
    def token_ffn_size(self) -> int:
        """Width of the activations of one token in the MLP, over all experts that it runs through."""
        return self.mlp_size * (self.moe_router_topk if self.num_experts else 1)

    @property
    def shared_ffn_size(self) -> int:
        """Inner width of the experts that all tokens share; 0: there are none."""
        return self.moe_shared_expert_intermediate_size if self.num_experts else 0

    @property
    def shared_is_gated(self) -> bool:
        return self.moe_shared_expert_gate and self.shared_ffn_size > 0

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "swiglu_clamped", "geglu_tanh")

    @property
    def qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def vocabulary(self) -> int:
        """vocab_size once it is known (the trainer resolves it from the tokenizer)."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not resolved yet: set --vocab-size or give a tokenizer")
        return self.vocab_size
