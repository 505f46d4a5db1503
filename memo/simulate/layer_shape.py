"""The sizes of one layer on one rank, which determine the times of its parts.

Shapes: t = s b / cp tokens gathered over tp; between matrices a rank of tp has t / tp of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from memo.config import RunConfig
from memo.program.kinds import Kind, kind_of
from memo.simulate.kernels import Group, Kernels
from memo.spec.shapes import layer_matrices
from memo.spec.skeleton import skeletal_tensors
from memo.spec.weights import Weight


@dataclass(frozen=True)
class LayerShape:
    """One layer of a run.

    Attributes:
        tiles: number of parts of the sequence that are computed one after the other.
        sweeps: whether attention is also computed tile by tile (memo.executor.sweep).
        under_autograd: whether torch's autograd runs the backward; it keeps the outputs of norms and activation
            functions.
    """

    config: RunConfig
    kernels: Kernels
    tiles: int = 1
    sweeps: bool = False
    under_autograd: bool = False

    @cached_property
    def kind(self) -> Kind:
        return kind_of(self.config.model)

    @cached_property
    def tokens(self) -> float:
        return self.config.data.seq_length * self.config.training.micro_batch_size / self.config.parallel.cp

    @cached_property
    def tile_tokens(self) -> float:
        return self.tokens / self.tiles

    @cached_property
    def attention_parts(self) -> int:
        """Parts of the sequence for which cp ranks exchange messages, one after the other."""
        return self.tiles if self.sweeps else 1

    @cached_property
    def window(self) -> int | None:
        """Tokens of the attention window; None if attention does not slide, or the window covers the sequence."""
        return self.config.model.window(self.config.data.seq_length)

    @cached_property
    def tp(self) -> Group:
        return Group(self.config.parallel.tp, 1)

    @cached_property
    def q(self) -> float:
        return self.config.model.num_attention_heads * self.config.model.head_dim / self.tp.size

    @cached_property
    def kv(self) -> float:
        """Width of k on this rank, and also of v."""
        return self.config.model.kv_heads * self.config.model.head_dim / self.tp.size

    @property
    def normed_heads(self) -> float:
        """Width of the heads that have norms, if any have."""
        return self.q + self.kv * (2 if self.config.model.v_layernorm else 1)

    @property
    def splits_norms(self) -> bool:
        """Whether the norms of q and k are over heads of several ranks."""
        return self.config.model.qk_layernorm_across_heads and self.tp.size > 1

    @property
    def adds_in_products(self) -> bool:
        """Whether the product of a weight gradient adds to the main gradient. On CPUs autograd's hook does it."""
        return self.kernels.adds_in_products and not (self.under_autograd and self.kernels.hardware.device == "cpu")

    def matrix(self, module: str) -> tuple[int, ...]:
        """Return outputs and inputs of a module's matrix on this rank, or of one expert's matrix."""
        return self._local_sizes[module]

    def is_frozen(self, module: str) -> bool:
        """Return whether a module's matrix is not trained."""
        return self._matrices[module].frozen

    def adapter(self, module: str) -> tuple[str, ...]:
        """Return the names of the two LoRA matrices of a module; empty if it has none."""
        names = tuple(f"{module}.adapter.{part}" for part in "ab")
        return names if names[0] in self._matrices else ()

    @cached_property
    def _matrices(self) -> Mapping[str, Weight]:
        return layer_matrices(self.config.model)

    @cached_property
    def _local_sizes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for module, weight in self._matrices.items():
            outputs, inputs = weight.local_shape(self.tp.size)
            found[module] = outputs // max(1, weight.experts), inputs
        return found

    def experts(self, module: str) -> int:
        """Return the number of experts that have a matrix each in a module; 0: all tokens run through one matrix."""
        return self._matrices[module].experts

    def rows(self, module: str) -> float:
        """Return the rows of a tile that a module multiplies: tokens, or one for each token and each of its experts."""
        return self.tile_tokens * (self.config.model.moe_router_topk if self.experts(module) else 1)

    def of_all_s(self, module: str, product_s: float) -> float:
        """Return the seconds of the products of all experts, if a module has experts; `product_s`: of one product."""
        experts = self.experts(module)
        return experts * product_s / self.kernels.hardware.efficiency.expert_matmul if experts else product_s

    def value_bytes(self, *names: str) -> float:
        """Return the bytes of values on this rank for the tokens of a tile: tp splits either tokens or width."""
        width = sum(self._widths.get(name, self.config.model.hidden_size) for name in names)
        return self.tile_tokens * width / self.tp.size * self.kernels.narrow

    def hidden_s(self, passes: float) -> float:
        """Return the seconds of `passes` passes over the hidden states of all tokens of this rank."""
        num_bytes = passes * self.tokens / self.tp.size * self.config.model.hidden_size * self.kernels.narrow
        return self.kernels.memory_s(num_bytes, self.tiles)

    @cached_property
    def _widths(self) -> dict[str, int]:
        """Elements per token, on all tp ranks, of each value that is not a hidden state."""
        of_whole = {"whole": self.tp.size}
        found = {each.name: each.width * of_whole.get(each.layout, 1) for each in skeletal_tensors(self.config.model)}
        return {**found, "latent_norm": found.get("latent", 0)}
