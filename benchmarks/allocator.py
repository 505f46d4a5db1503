"""Compares three allocators: memory reserved and in use, and requests of a step that reach the device.

    python benchmarks/allocator.py

default: torch's caching allocator. expandable_segments: this allocator with
PYTORCH_ALLOC_CONF=expandable_segments:True. planned: --memory-planner auto. All run under full recomputation at one
length, so that they serve the same requests. A CPU has no caching allocator: there only the planned allocator has
figures, its arena and its fallbacks.
"""

from measure import case_of, measured
from rows import Journal
from scales import arguments

ALLOCATORS: dict[str, tuple[str, dict[str, str]]] = {
    # name: (way, environment)
    "default": ("full-recompute", {}),
    "expandable_segments": ("full-recompute", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    "planned": ("full-recompute-plan", {}),
}


def main() -> None:
    args = arguments(__doc__)
    journal = Journal(f"{args.scale.name}/allocator")
    for name, (way, variables) in ALLOCATORS.items():
        case = case_of(args, way, args.scale.rank, args.scale.ablation_length, world=args.scale.world)
        row = journal.add({"allocator": name, "variables": variables, **measured(args, case, variables)})
        if row["status"] == "ok" and row["reserved_peak_bytes"] is not None:
            journal.amend(row, reserved_over_allocated=row["reserved_peak_bytes"] / row["allocated_peak_bytes"])


if __name__ == "__main__":
    main()
