"""A solution of a SwapProblem, and its expected costs."""

from typing import NamedTuple

from memo.planner.problem import Limit, SwapProblem


class SwapSolution(NamedTuple):
    """How much of each group moves, which limit prevents more, and the expected costs.

    Attributes:
        tiles: {group: how many of the problem's T tiles move}.
        alphas: {group: the share before it was rounded down to tiles}.
        limit: the limit that binds.
        moved_bytes: bytes of one layer and microbatch that move each way.
        host_bytes: bytes of this rank's records in host memory, and of staging buffers.
        disk_bytes: bytes of this rank's records on disk.
        device_bytes: bytes of the rounding buffers, or of all activations where they stay.
        hidden_share: share of the time of the copies alone that is hidden under compute; 1 when nothing moves.
        exposed_s: seconds that compute waits for the copies of one layer that moves, both ways together.
        recompute_s: seconds of recomputation in the backward of one layer.
        step_s: seconds of all passes, recomputation and waiting included.
        moves_nothing_is_best: all activations fit in device memory, so swapping and recomputing only cost time.
    """

    tiles: dict[str, int]
    alphas: dict[str, float]
    limit: Limit
    moved_bytes: int
    host_bytes: int
    device_bytes: int
    hidden_share: float
    exposed_s: float
    recompute_s: float
    step_s: float
    moves_nothing_is_best: bool
    disk_bytes: int = 0


def predict(problem: SwapProblem, tiles: dict[str, int], alphas: dict[str, float], limit: Limit) -> SwapSolution:
    """The solution that moves `tiles`, whatever limits it breaks.

    Known error: every backward recomputes here, even that of layers whose slots stay filled, and a copy starts together
    with the compute that hides it. The wait for the disk is that of its records one after the other: staging buffers,
    which let the disk lag behind by a few records, are not counted.
    """
    moved, recompute_s = problem.moved_bytes(tiles), problem.recompute_s(tiles)
    backward_s = problem.backward_s + recompute_s
    copies_s = exposed_s = 0.0
    if problem.num_moves:
        copied = problem.copied_bytes(moved)
        offload_s = problem.offload.copy_s(copied, problem.forward_s)
        prefetch_s = problem.prefetch.copy_s(copied, backward_s)
        copies_s = problem.offload.copy_s(copied, 0.0) + problem.prefetch.copy_s(copied, 0.0)
        exposed_s = max(0.0, offload_s - problem.forward_s) + max(0.0, prefetch_s - backward_s)
    split = problem.split(moved)
    if split is not None and split.disk_bytes and problem.disk is not None:
        on_disk = split.disk_bytes / (split.disk_bytes + split.host_bytes)
        write_s, read_s = moved / problem.disk.write_bytes_per_s, moved / problem.disk.read_bytes_per_s
        disk_s = max(0.0, write_s - problem.forward_s) + max(0.0, read_s - backward_s)
        exposed_s += on_disk * max(0.0, disk_s - exposed_s)
    return SwapSolution(
        tiles=tiles,
        alphas=alphas,
        limit=limit,
        moved_bytes=moved,
        host_bytes=problem.record_bytes(moved) if split is None else split.host_bytes,
        device_bytes=problem.buffer_bytes(tiles),
        hidden_share=max(0.0, 1.0 - exposed_s / copies_s) if copies_s else 1.0,
        exposed_s=exposed_s,
        recompute_s=recompute_s,
        step_s=problem.num_passes * problem.computed_s(tiles) + problem.num_moves * exposed_s,
        moves_nothing_is_best=problem.fits_resident,
        disk_bytes=0 if split is None else split.disk_bytes,
    )


def stay(problem: SwapProblem) -> SwapSolution:
    """The solution without swapping: every activation stays on the device, nothing is recomputed."""
    assert problem.resident_bytes is not None
    return SwapSolution(
        tiles={group.name: problem.tiles for group in problem.groups},
        alphas={group.name: 1.0 for group in problem.groups},
        limit=Limit.RESIDENT,
        moved_bytes=0,
        host_bytes=0,
        device_bytes=problem.resident_bytes,
        hidden_share=1.0,
        exposed_s=0.0,
        recompute_s=0.0,
        step_s=problem.num_passes * (problem.forward_s + problem.backward_s + problem.longer_s),
        moves_nothing_is_best=True,
    )
