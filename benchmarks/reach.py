"""Finds the longest sequence on which each way trains a whole model on one device, with all layers and states.

    python benchmarks/reach.py

Lengths are doubled from the shortest one until a step fails; then the length halfway back is tried. Every trial is a
row. A trial that exceeds its time is marked so: it says nothing about memory.
"""

from measure import case_of, measured
from rows import Journal
from scales import Arguments, Shape, arguments

WAYS = ("full-recompute", "layer-input-offload", "memo")


def longest(args: Arguments, journal: Journal, name: str, shape: Shape, way: str) -> None:
    """Add the trials of one way, and one row with the longest sequence."""
    fits, length = 0, args.scale.reach_from
    status, verdict = "ok", ""
    while length <= args.scale.reach_to and status == "ok":
        status = _try(args, journal, name, shape, way, length)
        if status == "ok":
            fits, length = length, 2 * length
    if status == "oom" and fits:
        between = fits + fits // 2
        if _try(args, journal, name, shape, way, between) == "ok":
            fits = between
    if status != "oom":
        verdict = "at least, the longest that was tried" if status == "ok" else f"at least, the next one: {status}"
    row = {"scale": args.scale.name, "kind": "longest", "model": name, "way": way, "seq_length": fits or None}
    journal.add({**row, "status": "ok" if fits else status, "message": verdict})


def _try(args: Arguments, journal: Journal, name: str, shape: Shape, way: str, seq_length: int) -> str:
    # The first update makes the optimizer's states, so the second iteration has everything on the device.
    case = case_of(args, way, shape, seq_length, warmup=1, steps=1)
    row = journal.add({**measured(args, case), "kind": "trial", "model": name})
    return str(row["status"])


def main() -> None:
    args = arguments(__doc__)
    journal = Journal(f"{args.scale.name}/reach")
    for name, shape in args.scale.whole.items():
        for way in WAYS:
            longest(args, journal, name, shape, way)


if __name__ == "__main__":
    main()
