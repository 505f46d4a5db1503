"""The working set of a layer under a swap plan, against what the executor's layer really holds."""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo.attention.select import select_backend
from memo.config import RunConfig, preset
from memo.config.derived import resolved_offload_tiles
from memo.estimate.swap_memory import working_set_bytes
from memo.executor.layer import TokenwiseLayer
from memo.executor.runtime import scratch_memory
from memo.executor.tile_machine import make_tiles
from memo.model.layer import TransformerLayer
from memo.model.parts import LayerContext, ModelParts
from memo.model.rope import rope_table
from memo.parallel.context import ContextAttention
from memo.profiler.layer import ScratchGradients
from memo.program.kinds import kind_of
from memo.spec.skeleton import SlotDims, skeletal_tensors
from memo.spec.slots import plan_slot


class LiveBytes(TorchDispatchMode):
    """Sum of the storages that operators made and that are still alive, and its peak."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def backward_peak_bytes(config: RunConfig) -> int:
    """Live bytes at the peak of one layer's backward beside its slot, the incoming gradient included."""
    model, length, tiles = config.model, config.data.seq_length, resolved_offload_tiles(config)
    attention = ContextAttention(select_backend("cpu", "cpu"), length, "p2p", None, None, scale=model.head_dim**-0.5)
    layer = TransformerLayer(ModelParts(model, torch.bfloat16, None, lambda _: attention), 0)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    gradients = {id(parameter): torch.zeros(parameter.shape) for parameter in layer.parameters()}
    dims = SlotDims(length, 1, 1, tiles, "bf16")
    layout = plan_slot(skeletal_tensors(model), dims, {})
    memory = scratch_memory(layout, torch.device("cpu"))
    sink = ScratchGradients(lambda parameter: gradients[id(parameter)])
    wrapped = TokenwiseLayer(layer, kind_of(model), 0, make_tiles(length, 1, tiles), layout, memory, sink, None)
    rope = None
    if model.position_embedding_type == "rope":
        rope = rope_table(model, torch.arange(length).unsqueeze(1), torch.bfloat16)
    x = torch.randn(length, 1, model.hidden_size).to(torch.bfloat16)
    grad, context = torch.randn_like(x), LayerContext(rope, None)
    with torch.no_grad():
        wrapped.run_forward(x, context)
        known = (x, grad, *layer.parameters(), *gradients.values(), *memory.tensors.values())
        with LiveBytes(known) as live:
            wrapped.run_backward(grad, context)
    return live.peak + grad.nbytes


@pytest.mark.parametrize(
    ("name", "length", "tiles"),
    [
        ("gpt-tiny", 1024, 8),
        ("gpt-tiny", 512, 1),
        ("llama-tiny", 1024, 8),
        ("qwen3-tiny", 512, 4),
        ("qwen3-tiny", 512, 16),  # tiles so small that the peak is attention's, with heads before and after their norm
    ],
)
def test_it_covers_a_real_layer(name: str, length: int, tiles: int) -> None:
    """Never too little, at most two fifths too much: fp32 sums and the workspace of GPU kernels count, and
    these operators do not show it."""
    torch.set_num_threads(1)
    config = RunConfig(model=preset(name)).override(
        {
            "vocab_size": 257,
            "device": "cuda",
            "params_dtype": "bf16",
            "seq_length": length,
            "offload_tiles": tiles,
            "offload_alpha": 0.0,
        }
    )
    assert 1.0 <= working_set_bytes(config) / backward_peak_bytes(config) <= 1.4
