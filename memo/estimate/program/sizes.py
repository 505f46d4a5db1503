"""The sizes of a layer on one rank, from which the sizes of all its tensors follow."""

from functools import lru_cache
from typing import NamedTuple

from memo.config import ModelConfig, RunConfig
from memo.config.derived import (
    layer_tiles,
    rank_tokens,
    resolved_a2a_size,
    resolved_attention,
    resolved_dtype,
    resolved_sections,
)
from memo.spec.custom_layer import Half, custom_facts
from memo.spec.shapes import layer_matrices
from memo.units import element_bytes

ON_CPUS_ALONE = frozenset(
    {
        *("gloo", "attention scratch", "norm scratch", "order of tokens"),
        # Kernels on a GPU add narrow numbers to wide ones without a cast.
        *("wide weight gradient", "wide head gradient", "wide embedding gradient", "wide part"),
    }
)


class LayerSizes(NamedTuple):
    """One rank's part of a layer. Widths are elements per token after the split over tp.

    Attributes:
        tokens: tokens of all sequences of a micro-batch, s / cp each, gathered over tp.
        batch: sequences of a micro-batch.
        narrow, wide: bytes of an element of the model, and of sums and statistics.
        heads, kv_heads, head_dim: heads of this tp rank and their width.
        ffn: width of the activation, over all experts of a token.
        activation_terms: number of further values of this width that backward of the activation needs.
        qk_norm, qk_across: whether each head of q and k is normed, or all heads of each together.
        v_norm: whether each head of v is normed.
        keys_as_values: whether keys before norm and RoPE are the values, which no matrix makes.
        experts, top_k: experts of a layer, and of each token; without experts one MLP computes all tokens.
        matrices: {path of the module: (outputs, inputs)} of each matrix, those of adapters included.
        frozen: modules whose matrices are not trained.
        ring, ring_rank, a2a: ranks of a ring of cp, this rank's place in the ring, and ranks that exchange heads.
        rotary_dim: dims of a head that RoPE rotates; 0: there is none.
        scales_queries: whether queries have a table of RoPE of their own.
        latents: as in ModelConfig.
        sinks: whether a logit of each query head joins its softmax.
        window: tokens of the sliding window, the token itself included; 0: there is none.
        attention: the kernels of attention, a value of --attention-backend other than auto.
        packed: whether a sequence may hold several documents.
        deterministic: whether the gradients of attention have the same bits each time.
        threads: CPU threads of one rank; each has scratch memory in attention.
        tiles: tiles of tokens in which the layer is computed.
        sections: parts of the sequence along which a swap plan sweeps layers; 0: it does not.
        hidden_on_host: whether hidden states between layers are in host memory.
        on_cuda: whether the device is a GPU.
        delta: whether a gated delta net replaces attention.
        fla: whether flash-linear-attention's kernels compute the delta net.
        halves: bytes of the halves of a custom layer (memo.spec.custom_layer); None for memo's own.
    """

    tokens: int
    batch: int
    tp: int
    narrow: int
    wide: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    experts: int
    top_k: int
    matrices: tuple[tuple[str, tuple[int, ...]], ...]
    gated: bool
    activation_terms: int
    rms: bool
    norms_from_zero: bool
    qk_norm: bool
    qk_across: bool
    v_norm: bool
    keys_as_values: bool
    linear_bias: bool
    rotary_dim: int
    scales_queries: bool
    ring: int
    ring_rank: int
    a2a: int
    gathers_kv: bool
    sinks: bool
    window: int
    attention: str
    packed: bool
    deterministic: bool
    threads: int
    tiles: int
    sections: int
    hidden_on_host: bool
    on_cuda: bool
    delta: bool = False
    fla: bool = False
    halves: tuple[Half, Half] | None = None
    latents: tuple[int, int, int] = (0, 0, 0)
    frozen: frozenset[str] = frozenset()

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def rope(self) -> bool:
        return self.rotary_dim > 0

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv(self) -> int:
        return self.q + 2 * self.kv + (2 * self.heads if self.delta else 0)

    @property
    def fc1(self) -> int:
        return self.ffn * (2 if self.gated else 1)

    @property
    def cut(self) -> int:
        """Most tokens, gathered over tp, of a chunk of embedding and loss: the tokens of a tile if layers are swept."""
        return self.tokens // self.tiles if self.sections else self.tokens

    @property
    def between_layers(self) -> int:
        """Bytes on the device of the hidden states between two layers, or of their gradient."""
        return 0 if self.hidden_on_host else self.tokens * self.hidden * self.narrow // self.tp

    @property
    def composes_norm(self) -> bool:
        """Whether a norm is composed of elementwise operations: torch has no kernel for RMSNorm on CPUs."""
        return self.rms and not self.on_cuda

    @property
    def widens_norm(self) -> bool:
        """Whether torch's kernel of a norm gets its input in the wide dtype, because its factor is wide."""
        return self.norms_from_zero and self.mixed and not self.composes_norm

    @property
    def statistic(self) -> int:
        """Bytes of one statistic that a norm's kernel keeps for a row."""
        return self.wide if self.on_cuda else self.narrow

    @property
    def never(self) -> frozenset[str]:
        """Names of requests that do not occur on this device: NCCL and GPU kernels do not ask torch's allocator."""
        return ON_CPUS_ALONE if self.on_cuda else frozenset()

    @property
    def mixed(self) -> bool:
        """Whether sums are wider than the model; in-place additions then cast what they add."""
        return self.narrow != self.wide


def layer_sizes(config: RunConfig, threads: int, tiles: int | None = None) -> LayerSizes:
    """Return the sizes of the first rank of each ring of K/V; `tiles`: of the whole model, if `config` has one kind of
    its layers.

    --attention-backend auto counts as its choice on GPUs of compute capability 9.0 and above.
    """
    model, parallel = config.model, config.parallel
    narrow, wide = element_bytes(resolved_dtype(config.training, config.hardware.device))
    a2a, (matrices, frozen) = resolved_a2a_size(model, parallel), _matrices(model, parallel.tp)
    return LayerSizes(
        tokens=rank_tokens(config),
        batch=config.training.micro_batch_size,
        tp=parallel.tp,
        narrow=narrow,
        wide=wide,
        hidden=model.hidden_size,
        heads=model.num_attention_heads // parallel.tp,
        kv_heads=model.kv_heads // parallel.tp,
        head_dim=model.head_dim,
        ffn=model.token_ffn_size // parallel.tp,
        experts=model.num_experts,
        top_k=model.moe_router_topk if model.num_experts else 1,
        matrices=matrices,
        gated=model.gated,
        activation_terms={"swiglu": 1, "swiglu_clamped": 3, "geglu_tanh": 1}.get(model.activation, 0),
        rms=model.normalization == "RMSNorm",
        norms_from_zero=model.apply_layernorm_1p,
        qk_norm=model.qk_layernorm and not model.custom_layer,
        qk_across=model.qk_layernorm_across_heads,
        v_norm=model.v_layernorm,
        keys_as_values=model.full_keys_as_values,
        linear_bias=model.add_bias_linear,
        rotary_dim=model.rotary_dim if model.rotation else 0,
        scales_queries=model.rope_llama_4_scaling_beta > 0,
        ring=parallel.cp // a2a,
        ring_rank=0,
        a2a=a2a,
        gathers_kv=parallel.cp_comm_type == "all_gather",
        sinks=model.attention_sinks,
        window=model.window(config.data.seq_length) or 0,
        attention=resolved_attention(config),
        packed=config.data.packs_documents,
        deterministic=config.hardware.deterministic,
        threads=threads,
        tiles=tiles or layer_tiles(config),
        sections=resolved_sections(config) if config.memory.sweeps else 0,
        hidden_on_host=config.memory.sweeps and config.memory.offload_hidden_states,
        on_cuda=config.hardware.device == "cuda",
        delta=model.is_linear,
        fla=config.hardware.delta_backend == "fla",
        latents=model.latents,
        halves=custom_facts(model).bytes_of(narrow, config.hardware.device == "cuda") if model.custom_layer else None,
        frozen=frozen,
    )


@lru_cache(maxsize=256)
def _matrices(model: ModelConfig, tp: int) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], frozenset[str]]:
    """Return the matrices of a layer with their shapes on a rank, and those that are not trained."""
    found = layer_matrices(model)
    shapes = tuple((module, weight.local_shape(tp)) for module, weight in found.items())
    return shapes, frozenset(module for module, weight in found.items() if weight.frozen)
