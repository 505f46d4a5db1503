"""Shared by the layers of one model: how a layer gets its parameters, and the context that comes with its input.

Shapes as in memo.model.layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.attention.delta_rule import DeltaNet
from memo.config.model import ModelConfig
from memo.model.norm import Norm
from memo.model.rope import RopeRows, RopeTable
from memo.parallel.adapter import Adapter
from memo.parallel.collectives import group_size
from memo.parallel.experts import ExpertMatrix
from memo.parallel.shards import ShardedParameter, sharded_parameter
from memo.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from memo.spec.lora import lora_factor
from memo.spec.shapes import adapted_rows, shape_of
from memo.spec.stack import stack_of
from memo.spec.weights import Weight
from memo_kernels import Ops, select_ops

Documents = tuple[tuple[int, ...], ...] | None
"""Document boundaries of each row of the micro-batch, 0 ... s_total; None: one document a row."""

CoreAttention = Callable[[Tensor, Tensor, Tensor, Documents, Tensor | None], Tensor]
"""Causal attention over q [s, b, a, d], k and v [s, b, k, d] of this rank's tokens -> [s, b, a, d], with sinks [a]."""


@dataclass(frozen=True)
class LayerContext:
    """The positions and documents of a layer's tokens, which it gets besides its input."""

    rope: RopeTable | RopeRows | None
    documents: Documents


@dataclass(frozen=True)
class ModelParts:
    """The settings, groups and kernels that the layers of one model share."""

    config: ModelConfig
    dtype: torch.dtype
    tp_group: ProcessGroup | None
    attention: Callable[[int], CoreAttention]
    """Returns the core attention of a layer, given its index."""
    ops: Ops = field(default_factory=lambda: select_ops("torch", torch.float32))
    delta_net: type[DeltaNet] = DeltaNet

    def parameter(self, weight: Weight, prefix: str = "") -> ShardedParameter:
        """This rank's part of a weight of the parameter table; `prefix`: prefix of its global tensors' names."""
        std = self.config.init_method_std
        if weight.split == "columns":
            # GPT-2: output projections are scaled down so that the residual's variance does not grow with depth.
            std /= math.sqrt(2 * self.config.num_layers)
        return sharded_parameter(weight, self.dtype, self.tp_group, std=std, prefix=prefix)

    def of_layer(self, layer: int, name: str) -> tuple[ShardedParameter, ShardedParameter | None]:
        """Weight and bias of the module `name` of a layer, as in the table of parameters."""
        return self.parameter_of(layer, f"{name}.weight"), self.in_layer(layer, f"{name}.bias")

    def kind(self, layer: int) -> ModelConfig:
        """The configuration of a model whose layers are all like this one."""
        return stack_of(self.config)[layer]

    def parameter_of(self, layer: int, name: str) -> ShardedParameter:
        """The parameter `name` of a layer, which must have it."""
        found = self.in_layer(layer, name)
        assert found is not None, f"layer {layer} has no {name}"
        return found

    def in_layer(self, layer: int, name: str) -> ShardedParameter | None:
        """The parameter `name` of a layer; None if the layer has none."""
        table = {weight.name: weight for weight in shape_of(self.kind(layer), "", 0).layer_weights}
        return self.parameter(table[name], f"layers.{layer}.") if name in table else None

    def column(self, layer: int, name: str) -> ColumnParallelLinear:
        weight, bias = self.of_layer(layer, name)
        return ColumnParallelLinear(weight, bias, self.tp_group, self._adapter(layer, name))

    def row(self, layer: int, name: str) -> RowParallelLinear:
        weight, bias = self.of_layer(layer, name)
        return RowParallelLinear(weight, bias, self.tp_group, self._adapter(layer, name))

    def matrix(self, layer: int, name: str) -> ExpertMatrix:
        """The matrices of all experts in one."""
        weight, bias = self.of_layer(layer, name)
        return ExpertMatrix(weight, bias, self._adapter(layer, name, is_of_experts=True))

    def _adapter(self, layer: int, name: str, *, is_of_experts: bool = False) -> Adapter | None:
        """The adapter of the matrix `name` of a layer, if it has one."""
        a, b = (self.in_layer(layer, f"{name}.adapter.{part}") for part in "ab")
        if a is None or b is None:
            return None
        rows = adapted_rows(self.kind(layer), name, group_size(self.tp_group))
        return Adapter(a, b, lora_factor(self.config), rows, self.kind(layer).num_experts if is_of_experts else 0)

    def norm(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Norm:
        config = self.config
        return Norm(weight, bias, config.norm_epsilon, self.ops, from_zero=config.apply_layernorm_1p)
