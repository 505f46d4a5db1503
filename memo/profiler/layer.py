"""Times one layer and the link to host memory, at the sizes of the run, before the first step.

A layer runs on random input with the executor's own code, in a buffer that keeps only the layer's input and attention's
output. One layer fits into memory if training does.
"""

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.artifacts.layer_profile import LayerProfile, ProfileKey
from memo.executor.host_pool import HostPool
from memo.executor.layer import TokenwiseLayer
from memo.executor.sweep import SweptLayer
from memo.executor.tile_machine import Context
from memo.parallel.collectives import all_reduce

_REPEATS = 3
_LONG_S = 1.0
"""If a run takes longer than this, its warm-up is a small part of its time."""
_LINK_BYTES = 256 << 20
"""Large enough to reach a link's full rate, and small compared to host memory."""


class ScratchGradients:
    """Adds weight gradients to the memory of training's gradients, which are set to zero before the first step."""

    def __init__(self, main_gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        self.main_gradient = main_gradient

    def gradient_done(self, parameter: nn.Parameter) -> None:
        pass


def profile_layer(
    layer: TokenwiseLayer | SweptLayer,
    kept: dict[str, Tensor],
    context: Context,
    x: Tensor,
    groups: Sequence[ProcessGroup | None],
    key: ProfileKey,
    tensor_bytes: dict[str, int],
) -> LayerProfile:
    """Time a layer on input x [n, b, h], which may be overwritten, on this rank.

    `key` and `tensor_bytes` become part of the result, and `kept` are the tensors of the layer's slot.

    All ranks of `groups`, its tensor- and context-parallel groups, must call this together: a layer communicates, so
    the ranks also agree on how often each piece runs. `layer` must work outside of a plan, in a slot whose layout moves
    no group.
    """
    device, tile = x.device, layer.tiles[0]
    # The first torch.autograd.grad imports this module, and with it sympy: a second that would count as backward.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")

    def seconds(work: Callable[[], object]) -> float:
        return median_s(work, device, groups)

    grad = torch.ones_like(x)
    with torch.no_grad():
        forward_s = seconds(lambda: layer.run_forward(x, context))
        recomputations = layer.recomputations(kept, tile, context)
        recompute_s = {group: seconds(work) for group, work in recomputations.items()}
        backward_s = seconds(lambda: layer.run_backward(grad, context))
    whole = {group: tile_s * key.offload_tiles for group, tile_s in recompute_s.items()}
    # The measured backward recomputed every group. As times are noisy, the difference has a lower limit.
    without = max(backward_s - sum(whole.values()), 0.1 * backward_s)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return LayerProfile(key, now, tensor_bytes, forward_s, without, whole, *_link_rates(device))


def _link_rates(device: torch.device) -> tuple[float, float, float, float]:
    """(offload alone, prefetch alone, offload under compute, prefetch under compute), bytes per second."""
    on_cuda = device.type == "cuda"
    num_bytes = _LINK_BYTES if on_cuda else _LINK_BYTES // 8
    # The same kind of host memory as in training; torch's pinned memory would stay with its allocator.
    with contextlib.closing(HostPool(1, num_bytes, device)) as pool:
        host, here = pool.record(0), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        alone = [
            num_bytes / median_s(lambda: host.copy_(here, non_blocking=True), device),
            num_bytes / median_s(lambda: here.copy_(host, non_blocking=True), device),
        ]
        if not on_cuda:
            return alone[0], alone[1], 0.0, 0.0
        busy = [_rate_under_compute(host, here), _rate_under_compute(here, host)]
        return alone[0], alone[1], busy[0], busy[1]


def _rate_under_compute(dst: Tensor, src: Tensor) -> float:
    """Bytes per second of a copy on its own stream while matrix products occupy the device."""
    stream, a = torch.cuda.Stream(), torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    for _ in range(16):
        a @ a
    with torch.cuda.stream(stream):
        begin.record()
        dst.copy_(src, non_blocking=True)
        end.record()
    torch.cuda.synchronize()
    return src.numel() / (begin.elapsed_time(end) / 1e3)


def median_s(work: Callable[[], object], device: torch.device, groups: Sequence[ProcessGroup | None] = ()) -> float:
    """Median seconds of a few runs after a warm-up run; if the first run takes long, its time alone."""
    first_s = torch.tensor(once_s(work, device), dtype=torch.float64, device=device)
    for group in groups:
        all_reduce(first_s, group, "max")
    if first_s.item() > _LONG_S:
        return first_s.item()
    return statistics.median(once_s(work, device) for _ in range(_REPEATS))


def once_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, on CUDA until the device has ended it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s
