"""A solution as text: the tensors that move or are recomputed, the limit that binds, and the costs."""

from memo.planner.problem import Limit, SwapProblem
from memo.planner.solution import SwapSolution
from memo.text_table import text_table
from memo.units import format_bytes


def describe(solution: SwapSolution, problem: SwapProblem, origin: str | None = None) -> str:
    """A title, a table with a row for each tensor or group, then limit, memory, time and remarks of one rank.

    Alpha, behind the number of tiles that move, is the share before it was rounded down or lowered. `origin` says where
    the times of the layer come from.
    """
    part = _part(problem)
    title = f"activations of one {part} and microbatch on this rank:"
    if problem.sections > 1:
        title = f"activations of one {part} ({problem.sections} a layer) and microbatch on this rank:"
    rows = [("tensor", f"a {part}", "tiles (alpha)", "between forward and backward"), *_rows(solution, problem)]
    source = [f"profile        {origin}"] if origin is not None else []
    return "\n".join(
        [title, text_table(rows, left=(0, 3)), "", *_summary(solution, problem), *source, *_remarks(solution, problem)]
    )


def headline(solution: SwapSolution, problem: SwapProblem, origin: str) -> str:
    """The solution in at most four lines: what moves, what it takes, `origin`, and what people may do about it."""
    if solution.limit == Limit.RESIDENT:
        return (
            f"activations: all {format_bytes(solution.device_bytes)} stay in device memory, so nothing moves "
            "(--offload-alpha off)"
        )
    shares = ", ".join(f"{name} {count}/{problem.tiles}" for name, count in solution.tiles.items() if count)
    again = f", {format_seconds(solution.recompute_s)} of recomputation a {_part(problem)}"
    taken = [
        f"device {format_bytes(solution.device_bytes)} of {format_bytes(problem.device_bytes)}",
        f"host {format_bytes(solution.host_bytes)} of {format_bytes(problem.host_bytes)}",
    ]
    if problem.disk is not None:
        taken.append(f"disk {format_bytes(solution.disk_bytes)} of {format_bytes(problem.disk.num_bytes)}")
    moves = f"{', '.join(problem.always)} move" + (f", and of the tokens of the rest {shares}" if shares else "")
    lines = [
        f"activations: {moves}{again if solution.recompute_s else ''}",
        f"  limit: {solution.limit}; copies {_percent(solution.hidden_share)} hidden; {', '.join(taken)}",
    ]
    remarks = _remarks(solution, problem)
    return "\n".join([*lines, f"  profile: {origin}", *(f"  {remark}" for remark in remarks[:1])])


def _part(problem: SwapProblem) -> str:
    """The content of a slot, to which all numbers refer."""
    return "section" if problem.sections > 1 else "layer"


def _rows(solution: SwapSolution, problem: SwapProblem) -> list[tuple[str, str, str, str]]:
    stays = solution.limit == Limit.RESIDENT
    away = "host memory" if problem.num_moves and not stays else "device memory"
    rows = [(name, format_bytes(size), "all", away) for name, size in problem.always.items()]
    for group in problem.groups:
        moved, tiles = solution.tiles[group.name], problem.tiles
        if moved == tiles:
            place = away
        elif moved == 0:
            place = f"recomputed in {format_seconds(group.recompute_s)}"
        else:
            rest_s = group.recompute_s * (tiles - moved) / tiles
            place = f"{away}, the rest recomputed in {format_seconds(rest_s)}"
        share = "all" if stays else f"{moved}/{tiles} ({solution.alphas[group.name]:.3f})"
        rows.append((group.name, format_bytes(group.num_bytes), share, place))
    for name, size in problem.never.items():
        share, place = ("all", away) if stays else ("none", "recomputed")
        rows.append((name, format_bytes(size), share, place))
    return rows


def _summary(solution: SwapSolution, problem: SwapProblem) -> list[str]:
    forward, backward = format_seconds(problem.forward_s), format_seconds(problem.backward_s + solution.recompute_s)
    return [
        f"limit          {solution.limit}",
        f"host memory    {format_bytes(solution.host_bytes)} of {format_bytes(problem.host_bytes)} for this rank: "
        f"{problem.num_records if solution.moved_bytes else 0} records of {format_bytes(solution.moved_bytes)}",
        *_disk(solution, problem),
        f"device memory  {format_bytes(solution.device_bytes)} of {format_bytes(problem.device_bytes)} for this rank",
        f"copies         {_percent(solution.hidden_share)} hidden under compute "
        f"(forward {forward}, backward {backward})",
        f"recomputation  {format_seconds(solution.recompute_s)} in the backward of a {_part(problem)}",
        f"step           {format_seconds(solution.step_s)}",
    ]


def _disk(solution: SwapSolution, problem: SwapProblem) -> list[str]:
    if problem.disk is None:
        return []
    disk = problem.disk
    return [
        f"disk           {format_bytes(solution.disk_bytes)} of {format_bytes(disk.num_bytes)} for this rank, written "
        f"at {disk.write_bytes_per_s / 1e9:.2f} GB/s and read at {disk.read_bytes_per_s / 1e9:.2f}; host memory has "
        "the records that wait shortest, and staging buffers"
    ]


def _remarks(solution: SwapSolution, problem: SwapProblem) -> list[str]:
    """Remarks that explain the numbers."""
    remarks = []
    if solution.moves_nothing_is_best:
        remarks.append("Moving nothing is best: all activations fit in device memory (--offload-alpha off).")
    if solution.limit == Limit.RESIDENT:
        return remarks
    if problem.disk is not None and not problem.disk.is_direct:
        remarks.append(
            "The file system of --offload-nvme-path has no direct I/O, so records pass through the page cache: give a "
            "directory on a local disk, such as one of ext4 or XFS."
        )
    if problem.num_moves == 0:
        remarks.append(f"No {_part(problem)} has to move: the backward of each follows while its slot is still filled.")
    elif solution.hidden_share < 1:
        remarks.append(
            f"Compute waits {format_seconds(solution.exposed_s)} for the copies of each {_part(problem)} that moves: "
            "a longer sequence or a faster link hides more."
        )
    if solution.limit == Limit.OTHERS:
        remarks.append("Ranks of a stage move the same tiles: those of the rank that can move least.")
    elif any(solution.tiles[name] < int(share * problem.tiles) for name, share in solution.alphas.items()):
        remarks.append(f"--offload-alpha was lowered: {solution.limit} does not hold more.")
    return remarks


def _percent(share: float) -> str:
    """A share as text, rounded down, so that 100 % means all of it."""
    return f"{int(share * 1000 + 1e-6) / 10:g} %"


def format_seconds(seconds: float) -> str:
    """`0.0123` -> `'12.3 ms'`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
