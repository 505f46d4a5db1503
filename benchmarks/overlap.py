"""Copies beside compute: rates of the link, and what of the copies a step hides (MEMO, figures 1b, 7 and 11).

    python benchmarks/overlap.py

Link: one large block, alone in each direction, both at once, and both while matrices are multiplied. Then steps with
different shares of the tokens moved, at every length: seconds of layers, of copies, and of compute standing still for
them, beside what the plan expects. On a CPU the copies run in the thread that computes, so nothing is ever hidden.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import case_of, in_fresh_process, measured
from rows import Journal
from scales import parser, resolve

from memo.executor.host_pool import HostPool
from memo.executor.select import make_backend
from memo.executor.streams import Stream
from memo.units import MIB

REPETITIONS = 5


def link_rates(device: torch.device) -> dict[str, Any]:
    """GB/s of each direction: medians of five."""
    block_bytes, size = (1024 * MIB, 8192) if device.type == "cuda" else (32 * MIB, 256)
    pool, backend = HostPool(2, block_bytes, device), make_backend("auto", device)
    out, back = (torch.zeros(block_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.ones(size, size, dtype=dtype, device=device)

    def offload() -> None:
        backend.copy(Stream.OFFLOAD, pool.record(0), out, "record0", "out")

    def prefetch() -> None:
        backend.copy(Stream.PREFETCH, back, pool.record(1), "back", "record1")

    def both() -> None:
        offload()
        prefetch()

    def beside_compute() -> None:
        both()
        for _ in range(20):
            torch.mm(a, a)

    def copies_s(work: Callable[[], None]) -> tuple[float, float]:
        """Seconds of the offload and of the prefetch stream's work."""
        backend.synchronize()
        begun = {stream: backend.timestamp(stream) for stream in (Stream.OFFLOAD, Stream.PREFETCH)}
        work()
        ended = {stream: backend.timestamp(stream) for stream in begun}
        backend.synchronize()
        return ended[Stream.OFFLOAD].seconds_since(begun[Stream.OFFLOAD]), ended[Stream.PREFETCH].seconds_since(
            begun[Stream.PREFETCH]
        )

    beside_compute()  # the first touch of everything
    found: dict[str, Any] = {"block_bytes": block_bytes}
    for name, work, directions in (
        ("offload_alone", offload, (0,)),
        ("prefetch_alone", prefetch, (1,)),
        ("both_at_once", both, (0, 1)),
        ("beside_compute", beside_compute, (0, 1)),
    ):
        taken = [copies_s(work) for _ in range(REPETITIONS)]
        for at in directions:
            seconds = statistics.median(one[at] for one in taken)
            found[f"{name}_{('offload', 'prefetch')[at]}_gb_per_s"] = block_bytes / seconds / 1e9
    return found


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--link", choices=["cpu", "cuda"], help="print the rates of this device's link, and nothing else"
    )
    given = flags.parse_args()
    if given.link:
        print(json.dumps({"status": "ok", **link_rates(torch.device(given.link))}))
        return
    args = resolve(given)
    journal = Journal(f"{args.scale.name}/overlap")
    link = in_fresh_process([sys.executable, __file__, "--link", args.scale.device], min(120.0, args.left_s))
    journal.add({"scale": args.scale.name, "way": "link", **link})
    for seq_length in args.scale.lengths:
        for alpha in args.scale.alphas:
            flags_of = {"offload_alpha": alpha, "offload_policy": "paper"}
            case = case_of(args, "memo", args.scale.rank, seq_length, world=args.scale.world, flags=flags_of)
            journal.add({**measured(args, case), "alpha": alpha})


if __name__ == "__main__":
    main()
