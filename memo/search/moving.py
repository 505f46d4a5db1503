"""What --offload-alpha auto moves on GPUs that hold what the account of memory says they hold."""

from dataclasses import dataclass, replace

from memo.config import RunConfig
from memo.config.derived import resolved_dtype
from memo.errors import HostMemoryError, PlanError
from memo.estimate.accounts import Account
from memo.estimate.calibration import FITS_SHARE, USABLE_SHARE
from memo.estimate.hardware import Hardware
from memo.estimate.host_memory import node_budget_bytes
from memo.estimate.verdict import Room
from memo.planner.problem import Limit
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.swapping import choose, swap_problem
from memo.spec.slots import SLOT_ALIGNMENT_BYTES


@dataclass(frozen=True)
class Moving:
    """What moves of every layer.

    Attributes:
        tiles: by group of `memo.spec.skeleton`.
        limit: what keeps more from moving.
        layer_s: forward and backward of one layer with its recomputation, no waiting.
        link_s: of one step of the first stage, that its copies in one direction take.
    """

    tiles: dict[str, int]
    limit: Limit
    layer_s: float
    link_s: float


def plan_moving(config: RunConfig, account: Account, hardware: Hardware, room: Room) -> Moving:
    """Decide what a rank moves that has to swap, from the simulator's times.

    Device memory and the host's are taken up to where the verdict is still "fits". Where even nothing but what
    always moves does not fit, that is the answer: its memory says by how much.

    Args:
        config: with --offload-alpha auto and --device cuda.
    """
    world_size = account.world_size
    layer = swapped_layer(config, Kernels(hardware, resolved_dtype(config, "cuda")))
    free = swap_problem(config, world_size, hardware, layer)
    nothing = free.uniform(0)
    others = []
    for stage in {0, config.parallel.pp - 1}:
        rank = account.stage(config, stage, nothing)
        others.append(rank.total - rank.rounding_buffers)
    padding = 2 * len(free.groups) * SLOT_ALIGNMENT_BYTES  # of both slots
    problem = replace(
        free,
        device_bytes=max(0, int(FITS_SHARE * USABLE_SHARE * room.gpu_bytes) - max(others) - padding),
        host_bytes=node_budget_bytes(room.host_bytes, None) // min(world_size, hardware.gpus_per_node),
    )
    tiles, limit = nothing, Limit.DEVICE
    try:
        solution = choose(problem, "auto")
        tiles, limit = solution.tiles, solution.limit
    except HostMemoryError:
        limit = Limit.HOST
    except PlanError:
        pass
    slower = min(hardware.offload_gb_per_s, hardware.prefetch_gb_per_s) * 1e9
    layer_s = problem.forward_s + problem.backward_s + problem.recompute_s(tiles)
    return Moving(tiles, limit, layer_s, problem.num_moves * problem.moved_bytes(tiles) / slower)
