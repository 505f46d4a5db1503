"""Chooses which activations --offload-alpha auto moves, for GPUs whose use of memory an account predicts."""

from dataclasses import replace
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import resolved_dtype
from memo.errors import DiskError, HostMemoryError, PlanError
from memo.estimate.accounts import Account
from memo.estimate.attention_rates import with_attention_of
from memo.estimate.hardware import Hardware
from memo.estimate.swap_memory import swap_bytes
from memo.estimate.unseen_memory import page_table_bytes
from memo.estimate.verdict import Capacity, room_for_unseen
from memo.planner.problem import Limit
from memo.simulate.cost import LayerCost
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.swapping import choose, disk_of_rank, modelled_problem
from memo.spec.slots import SLOT_ALIGNMENT_BYTES


class SwapChoice(NamedTuple):
    """Which activations of every layer move, and the costs of moving them.

    Attributes:
        tiles: number of tiles that move, by group of `memo.spec.skeleton`.
        limit: the limit that prevents more tiles from moving.
        layer_s: seconds of forward and backward of one layer with its recomputation, without waiting for copies.
        link_s: seconds that the copies of one step take in one direction, on the first stage.
    """

    tiles: dict[str, int]
    limit: Limit
    layer_s: float
    link_s: float


def choose_swap(
    config: RunConfig, account: Account, hardware: Hardware, capacity: Capacity, layer: LayerCost | None = None
) -> SwapChoice:
    """Choose the activations that a rank moves, from simulated times, so that the verdict on its memory is "fits".

    If the run does not even fit when only the activations move that always do, this least choice is returned; the
    account of its memory then tells how much is missing.

    Args:
        config: a configuration with --offload-alpha auto and --device cuda.
        layer: the result of `memo.simulate.layer.swapped_layer`, if it is known.
    """
    world_size = account.world_size
    if layer is None:
        kernels = Kernels(with_attention_of(hardware, config), resolved_dtype(config.training, "cuda"))
        layer = swapped_layer(config, kernels)
    free = modelled_problem(config, world_size, hardware, layer)
    nothing = free.uniform(0)
    others_bytes, rank = max(
        ((rank.total - rank.rounding_buffers, rank) for rank in account.stages(config, nothing).values()),
        key=lambda pair: pair[0],
    )
    # Host memory of moved activations is pinned, which takes page tables. Some room is left, as the memory that torch
    # does not see is not known exactly.
    moved_host = swap_bytes(config, world_size, 0, free.uniform(free.tiles)).host
    room = page_table_bytes(moved_host) + room_for_unseen(account.unseen(config, rank))
    padding = 2 * len(free.groups) * SLOT_ALIGNMENT_BYTES  # for both slots
    # With a disk, host memory is filled to its last record, so the padding between the tensors of records counts.
    disk = disk_of_rank(config, world_size, hardware)
    lost_bytes = 0 if disk is None else free.num_records * len(free.always | free.never) * SLOT_ALIGNMENT_BYTES
    host_bytes = capacity.sure_host_bytes // hardware.local_ranks(world_size)
    problem = replace(
        free,
        device_bytes=max(0, int(capacity.sure_gpu_bytes) - others_bytes - padding - room),
        host_bytes=max(0, host_bytes - lost_bytes),
        disk=disk,
    )
    tiles, limit = nothing, Limit.DEVICE
    try:
        solution = choose(problem, "auto")
        tiles, limit = solution.tiles, solution.limit
    except HostMemoryError:
        limit = Limit.HOST
    except DiskError:
        limit = Limit.DISK
    except PlanError:
        pass
    slower = min(hardware.offload_gb_per_s, hardware.prefetch_gb_per_s) * 1e9
    layer_s = problem.sections * problem.computed_s(tiles)
    return SwapChoice(tiles, limit, layer_s, problem.num_moves * problem.moved_bytes(tiles) / slower)
