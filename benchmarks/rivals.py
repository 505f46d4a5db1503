"""Other ways to fit activations, on memo's own executor.

Every way computes layers by the same operations on the same tiles as memo (memo.executor.tile_machine). Ways differ
only in the activations that they keep, move and recompute. So a comparison of speeds compares nothing else, and losses
are equal to the last bit.

keep_everything        every layer has a buffer of its own, and nothing moves: the ideal
recompute_layers       every layer keeps only its input, and runs forward again before its backward, up to the last
                       product, whose result is not needed (torch.utils.checkpoint stops there too)
offload_layer_inputs   recompute_layers, with the inputs in host memory
tile_mlp               offload_layer_inputs, with the MLP computed a third time, tile by tile: ALST

Copies to host memory and back overlap with compute: while a layer computes, the input of the previous layer is
offloaded, or the input of the next layer is prefetched. Published programs overlap no better: TRL's OffloadActivations
(trl/models/activation_offloading.py) offloads on a stream of its own, but its compute waits for each copy back, and the
checkpoints of ALST (arctic_training/monkey_patches.py) block for both copies.

ALST (arXiv 2506.13996; TiledMLP in deepspeed/runtime/sequence_parallel/ulysses_sp.py) computes the MLP tile by tile,
keeps only its input, and recomputes each tile in backward. Under a checkpoint of the layer the MLP thus runs forward
three times, as its authors write. Here the third time leaves out the last product, which is in ALST's favour.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles
from memo.executor.host_budget import HostBudget
from memo.executor.layer import TokenwiseLayer
from memo.executor.runtime import SwapRuntime
from memo.executor.slots import slot_tensors
from memo.executor.streams import StreamBackend
from memo.executor.tile_machine import Context, Tile, make_tiles
from memo.mesh import Mesh
from memo.model.transformer import TransformerChunk
from memo.parallel.data import ShardedDataParallel
from memo.parallel.main_gradients import MainGradients
from memo.planner.swap import SwapPlan, swap_plan
from memo.program.kinds import kind_of
from memo.spec.skeleton import skeletal_tensors
from memo.spec.slots import SlotLayout, plan_slot, slot_dims, slot_layout
from memo.train.swap import ChosenSwap

OF_LAYERS = ("qkv", "residual", "fc1")
OF_TILED_MLP = ("qkv", "residual")
"""Groups of activations of which a layer keeps all tiles from its second forward to its backward."""


def kept_tiles(config: RunConfig, groups: Sequence[str]) -> dict[str, int]:
    """Return the tiles that are kept, by group: all tiles of `groups`, and no tiles of further groups."""
    return {group: slot_dims(config).tiles if group in groups else 0 for group in OF_LAYERS}


def input_layout(config: RunConfig) -> SlotLayout:
    """Return the layout of a buffer for the input of one layer."""
    place = slot_layout(config, 0.0).places["input"]
    return SlotLayout({"input": place}, None, place.num_bytes, place.num_bytes)


def work_layout(config: RunConfig, groups: Sequence[str]) -> SlotLayout:
    """Return the layout of a buffer for all values that a layer computes and keeps until its backward."""
    skeleton = tuple(tensor for tensor in skeletal_tensors(config.model) if tensor.name != "input")
    return plan_slot(skeleton, slot_dims(config), kept_tiles(config, groups))


class InputsInSlots(SwapRuntime):
    """Slots hold only the inputs of layers; all other values lie in one buffer, which the next layer overwrites.

    A first forward keeps nothing in this buffer. After `recall` the layer runs forward once more and keeps the values
    that its backward reads. So its backward recomputes only norms and activation functions, as any backward on tiles.
    """

    def __init__(
        self,
        plan: SwapPlan,
        config: RunConfig,
        groups: Sequence[str],
        backend: StreamBackend,
        device: torch.device,
        host: HostBudget,
    ) -> None:
        """`groups`: OF_LAYERS or OF_TILED_MLP. Raises the errors of SwapRuntime."""
        super().__init__(plan, input_layout(config), backend, device, host)
        self.again = work_layout(config, groups)
        work = torch.empty(self.again.slot_bytes, dtype=torch.uint8, device=device)
        made = slot_tensors(self.again, work, self._workspace)
        self._views = [{**made, **of_slot} for of_slot in self._views]
        self._on_device.append(work)
        self._recalled: dict[str, Tensor] | None = None

    @property
    def recomputes(self) -> bool:
        """Whether a layer is between `recall` and the end of its backward."""
        return self._recalled is not None

    def recall(self, layer: int) -> Tensor:
        """Return the input [n, b, h] of the layer whose backward is next, once it has arrived."""
        self._recalled = super().begin("B", layer)
        return self._recalled["input"]

    def begin(self, kind: str, layer: int) -> dict[str, Tensor]:
        return super().begin(kind, layer) if self._recalled is None else self._recalled

    def end(self, kind: str, layer: int) -> None:
        if self._recalled is not None and kind == "F":
            return  # the backward of this layer follows, in the same buffers
        self._recalled = None
        super().end(kind, layer)

    def next_step(self) -> None:
        self._recalled = None
        super().next_step()


class RecomputedLayer(TokenwiseLayer):
    """Runs forward twice; the second time up to the last product, unless the MLP is tiled."""

    memory: InputsInSlots

    def run_backward(self, grad: Tensor, context: Context) -> Tensor:
        x, first = self.memory.recall(self.index), self.layout
        self.layout, self._kept = self.memory.again, {}
        super().run_forward(x, context)
        grad = super().run_backward(grad, context)
        self.layout, self._kept = first, {}
        return grad

    def own(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        return slot

    def _finish(self, kept: dict[str, Tensor], tile: Tile, context: Context, out: Tensor) -> None:
        # A tiled MLP is one function, whose whole forward runs before autograd learns what it keeps.
        if self.memory.recomputes and "fc1" in self.layout.places:
            self._keep_again(kept, tile, context)
        else:
            super()._finish(kept, tile, context, out)


@dataclass(frozen=True)
class Rival:
    """A way, which replaces memo.train.swap.start: it allocates the memory and replaces every plain layer.

    Attributes:
        groups: groups of activations of which a layer keeps all tiles until its backward.
        recomputes: whether a layer keeps them only from a second forward on, which begins with the layer's input.
        moves: whether inputs go to host memory, through two buffers; else every layer has a buffer of its own.
    """

    groups: tuple[str, ...] = OF_LAYERS
    recomputes: bool = True
    moves: bool = False

    def __call__(
        self,
        config: RunConfig,
        mesh: Mesh,
        chosen: ChosenSwap,
        chunks: Sequence[TransformerChunk],
        data_parallel: ShardedDataParallel,
        backend: StreamBackend,
        host: HostBudget,
    ) -> SwapRuntime:
        device, plan, runtime = data_parallel.device, self.plan(chosen.plan), None
        if self.recomputes:
            runtime, kind = InputsInSlots(plan, config, self.groups, backend, device, host), RecomputedLayer
        else:
            layout = slot_layout(config, kept_tiles(config, self.groups))
            runtime, kind = SwapRuntime(plan, layout, backend, device, host), TokenwiseLayer
        _put_on_tiles(kind, runtime, config, mesh, chunks, data_parallel.main_gradients)
        return runtime

    def plan(self, of_memo: SwapPlan) -> SwapPlan:
        """Return memo's own plan with two slots if inputs move, else a plan with so many slots that nothing moves."""
        ops = [step.op for step in of_memo.steps]
        return of_memo if self.moves else swap_plan(ops, max_slots=sum(op.kind == "F" for op in ops))

    def buffer_bytes(self, config: RunConfig) -> int:
        """Return the bytes of the buffers on the device, for one microbatch at a time."""
        num_slots = 2 if self.moves else config.model.num_layers
        if self.recomputes:
            return num_slots * input_layout(config).slot_bytes + work_layout(config, self.groups).slot_bytes
        return slot_layout(config, kept_tiles(config, self.groups)).buffer_bytes(num_slots)


keep_everything = Rival(recomputes=False)
recompute_layers = Rival()
offload_layer_inputs = Rival(moves=True)
tile_mlp = Rival(OF_TILED_MLP, moves=True)


def _put_on_tiles(
    kind: type[TokenwiseLayer],
    memory: SwapRuntime,
    config: RunConfig,
    mesh: Mesh,
    chunks: Sequence[TransformerChunk],
    sink: MainGradients,
) -> None:
    tokens = config.data.seq_length // config.parallel.cp
    tiles = make_tiles(tokens, config.parallel.tp, resolved_offload_tiles(config))
    for chunk in chunks:
        for position, layer in enumerate(chunk.layers):
            of_model, index = kind_of(config.model), chunk.layer_indices[position]
            chunk.layers[position] = kind(layer, of_model, index, tiles, memory.layout, memory, sink, mesh.tp)
