"""Values that every rank has besides parameters: they have no gradient, and no optimizer updates them.

They are in fp32, whatever the dtype of the parameters, and lie in checkpoints and weight files under names of their own
(memo.spec.shapes.ModelShape.constants).
"""

import torch
from torch import Tensor, nn

from memo.config.model import ModelConfig
from memo.parallel.shards import Shard, whole
from memo.parallel.units import MasterSegment
from memo.spec.buckets import ParameterRange, Segment
from memo.spec.shapes import LAYER_SCALAR


def as_segment(name: str, values: Tensor) -> MasterSegment:
    """The global tensor `name`, all of which is `values`, one-dimensional, as a segment for checkpoints and files."""
    segment = Segment(ParameterRange(name, tuple(values.shape), 0), 0, len(values), 0)
    shard = Shard((whole(name, tuple(values.shape)),), replicated="all")
    return MasterSegment(segment, shard, nn.Parameter(values, requires_grad=False))


def layer_scalars(model: ModelConfig, device: torch.device) -> Tensor | None:
    """[L] ones, the factors on the outputs of all layers (--layer-scalar); None for a model without them."""
    return torch.ones(model.num_layers, device=device) if model.layer_scalar else None


def scalar_segments(scalars: Tensor | None) -> list[MasterSegment]:
    """The factors of `layer_scalars` as segments."""
    parts = () if scalars is None else scalars.split(1)
    return [as_segment(f"layers.{layer}.{LAYER_SCALAR}", part) for layer, part in enumerate(parts)]
