"""`memo solve`: finds addresses for a recorded iteration, or for a problem in minimalloc's format."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from memo.artifacts.fields import PositiveFloat
from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.memory_trace import Trace
from memo.config.command_line import parse_options
from memo.config.flag import BYTES, TOKENS, Flag, ReadWith
from memo.config.require import require
from memo.errors import EXIT_FAILED, tell
from memo.planner.memory import minimalloc
from memo.planner.memory.dsa import Solution
from memo.planner.memory.iteration import SolvedProblem
from memo.planner.memory.solve import TIME_LIMIT_S, solve
from memo.planner.memory.trace_plan import Planner, solve_trace
from memo.planner.traces import extrapolate
from memo.text_table import text_table
from memo.units import MIB, format_bytes

ABOUT = (
    "Give each memory request of a trace, or each block of a CSV file, a fixed address so that the peak is low. "
    "Exit status: 0; 3 if the peak exceeds --capacity (the best addresses are still written); 2 for bad input."
)
EXAMPLES = (
    "memo solve --trace trace.json --out plan.json",
    "memo solve --csv blocks.csv --out placed.csv --capacity 1GiB",
)


_TRACE, _CSV = ReadWith("trace", use="--trace FILE"), ReadWith("csv", use="--csv FILE")


@dataclass(frozen=True, kw_only=True)
class _Options:
    out: str
    """File to write: a memory plan for --trace, a CSV file with offsets for --csv."""
    trace: tuple[str, ...] = ()
    """Memory trace of an iteration; or three or more traces of one run at different lengths, for --seq-length."""
    seq_length: Annotated[int | None, TOKENS, Flag(aliases=("seq_len",)), _TRACE] = None
    """With several traces: plan this length. Every request must be linear in the length; the third trace proves it."""
    csv: str | None = None
    """Blocks in minimalloc's format: columns id, lower, upper, size."""
    planner: Annotated[Planner | None, _TRACE] = None
    """paper: in two levels; flat: all at once; auto (the default): the better of both."""
    min_bytes: Annotated[int, BYTES, _TRACE] = MIB
    """Smaller requests are not planned."""
    capacity: Annotated[int | None, BYTES, _CSV] = None
    """Limit of the peak in bytes; the search ends as soon as it is met."""
    time_limit: PositiveFloat = TIME_LIMIT_S
    """Seconds for all solvers together."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises MemoError for bad input."""
    options = parse_options(_Options, argv, prog="memo solve", about=ABOUT, examples=EXAMPLES)
    require(
        bool(options.trace) != (options.csv is not None),
        f"--trace is {' '.join(options.trace) or None} and --csv is {options.csv}, but one of them is what to solve: "
        "give exactly one",
    )
    return _solve_trace(options) if options.csv is None else _solve_csv(options, options.csv)


def _trace(options: _Options) -> Trace:
    """The given trace, or the trace extrapolated from several to --seq-length."""
    traces = [Trace.load(path) for path in options.trace]
    require(
        (len(traces) > 1) == (options.seq_length is not None),
        f"--trace has {len(traces)} files and --seq-length is {options.seq_length}: several traces foretell that of "
        "another length, so give both, or one trace alone",
    )
    if options.seq_length is None:
        return traces[0]
    lengths = [trace.run.get("seq_length", 0) for trace in traces]
    require(
        all(length > 0 for length in lengths),
        f"--trace: a file does not say its seq_length ({lengths}): write it again with memo profile --trace-out",
    )
    return extrapolate(list(zip(lengths, traces, strict=True)), options.seq_length)


def _solve_trace(options: _Options) -> int:
    trace = _trace(options)
    planning = solve_trace(
        trace,
        planner=options.planner or "auto",
        min_bytes=options.min_bytes,
        time_limit_s=options.time_limit,
    )
    plan = planning.plan
    plan.save(options.out)
    print(_table(planning.parts))
    num_requests = sum(len(phase.requests) for phase in plan.phases)
    print(f"planner  {plan.planner}: {num_requests:,} requests in {len(plan.phases):,} phases")
    _print_result(plan, plan.arena_bytes, [part.solution for part in planning.parts], options.out)
    return 0


def _solve_csv(options: _Options, path: str) -> int:
    problem = minimalloc.read_csv(path, options.capacity)
    solution = solve(problem, options.time_limit)
    minimalloc.write_csv(options.out, problem, solution)
    print(f"solver   {solution.solver}: {len(problem.blocks):,} blocks")
    _print_result(solution, solution.peak_bytes, [solution], options.out)
    capacity_bytes = options.capacity
    if capacity_bytes is None or solution.peak_bytes <= capacity_bytes:
        return 0
    impossible = solution.lower_bound_bytes > capacity_bytes
    remedy = "no plan fits: give more" if impossible else "whether one fits is open: give more time or more bytes"
    tell(
        f"--capacity is {capacity_bytes:,} bytes, the peak {solution.peak_bytes:,} and the lower bound "
        f"{solution.lower_bound_bytes:,}: {remedy}"
    )
    return EXIT_FAILED


def _table(parts: Sequence[SolvedProblem]) -> str:
    rows = [("part", "phases", "requests", "bound", "peak", "gap", "proof", "solver")]
    for part in parts:
        found = part.solution
        sizes = format_bytes(found.lower_bound_bytes), format_bytes(found.peak_bytes), f"{found.gap:.2%}"
        rows.append((part.name, f"{part.num_phases:,}", f"{part.num_blocks:,}", *sizes, found.proof, found.solver))
    return text_table(rows, left=range(len(rows[0])))


def _print_result(found: MemoryPlan | Solution, peak_bytes: int, solutions: Sequence[Solution], out: str) -> None:
    bound_bytes = found.lower_bound_bytes
    gap = peak_bytes / bound_bytes - 1 if bound_bytes else 0.0
    print(f"bound    {bound_bytes:,} bytes ({format_bytes(bound_bytes)})")
    print(f"peak     {peak_bytes:,} bytes ({format_bytes(peak_bytes)})")
    print(f"gap      {gap:.2%}, {found.proof}")
    seconds: Counter[str] = Counter()
    for solution in solutions:
        seconds.update(solution.seconds)
    print("seconds  " + (", ".join(f"{name} {spent_s:.2f}" for name, spent_s in seconds.items()) or "none"))
    print(f"wrote {out}")
