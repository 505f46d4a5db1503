"""Values that every rank has besides parameters: they have no gradient, and no optimizer updates them.

They are in fp32, whatever the dtype of the parameters, and lie in checkpoints and weight files under names of their own
(memo.spec.shapes.ModelShape.constants).
"""

from torch import Tensor, nn

from memo.parallel.shards import Shard, whole
from memo.parallel.units import MasterSegment
from memo.spec.buckets import ParameterRange, Segment


def as_segment(name: str, values: Tensor) -> MasterSegment:
    """The global tensor `name`, all of which is `values`, one-dimensional, as a segment for checkpoints and files."""
    segment = Segment(ParameterRange(name, tuple(values.shape), 0), 0, len(values), 0)
    shard = Shard((whole(name, tuple(values.shape)),), replicated="all")
    return MasterSegment(segment, shard, nn.Parameter(values, requires_grad=False))
