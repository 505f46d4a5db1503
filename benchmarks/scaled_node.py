"""A node in small: how much of swapping and recomputation hides behind compute, measured on a CPU with a slow link.

    python benchmarks/scaled_node.py [--over-hidden 16 32 64] [--hidden-size 128] [--turns 10]
    python benchmarks/scaled_node.py --device-mib 48 --host-mib 154 --hidden-size 64 --over-hidden 64 128 256 \
        --ways full-recompute layer-input-offload full-swap memo memo-swept

What hides depends on two ratios alone: FLOP/s over what the link moves, and the sequence's length over the hidden size.
So one core is the GPU, and copies run in threads that are held to a rate at which a layer's FLOPs and its activations
stand to each other as on NODE (a DMA engine costs the cores nothing: the copy is short, the rest is waiting). At
length / hidden size of 16 to 256 these are the proportions of 64K to 1M tokens with a hidden size of 4,096. A smaller
hidden size makes the longest of them affordable: a step takes time in proportion to its cube.

A core's speed drifts by a tenth within minutes. So each way (benchmarks/ways.py) is a process of its own, and all of
them take turns, a step each, in one order and then in the reverse one. Ratios are medians over turns of two steps that
were taken within one turn; what they differ by from turn to turn is kept beside them.

Which ways fit is found by running each of them against a limit, of half of what the ideal takes, or of --device-mib and
--host-mib, where only what fits takes turns. Beside each row stands what was foreseen from pieces that took turns as
well (benchmarks/scaled_foresight.py). Measured on CPU, on the scaled node: no GPU has confirmed it.

Rows of the lengths, the hidden size and the limit that are run take the place of earlier ones.
"""

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import Case
from rows import Journal
from scaled_foresight import foresee
from scaled_pieces import Pieces
from scaled_process import PIECES, NoRoom, Process
from scaled_steps import IDEALS, LEAST_MEMORY_WAYS, PLANNED_WAYS, SCALED_WAYS, Work

from memo.config import HardwareConfig
from memo.estimate.machines import find_hardware
from memo.train.device import device_peak

NODE = find_hardware("a800-80")
NODE_HIDDEN, HIDDEN, LAYERS = 4096, 128, 6
NODE_DTYPE_BYTES, DTYPE_BYTES = 2, 4
DEVICE_SHARE = 0.5
SHAPE = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HIDDEN // 64, "vocab_size": 512}
MIB = 1 << 20
WAYS = [way for way in (*SCALED_WAYS, *PLANNED_WAYS, *LEAST_MEMORY_WAYS) if way != "ideal"]


def link_bytes_per_s(flops: float, hidden: int = HIDDEN) -> float:
    """The rate at which a device of `flops`, with a model of `hidden` size, has a link like NODE's.

    Of a layer, FLOPs a token grow with the square of the hidden size and activations with the hidden size, so FLOP/s
    over elements per second may fall with it.
    """
    node = NODE.peak_flops("bf16") / (NODE.offload_gb_per_s * 1e9 / NODE_DTYPE_BYTES)
    return flops / (node * hidden / NODE_HIDDEN) * DTYPE_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over-hidden", nargs="+", type=int, default=[16, 32, 48, 64, 128])
    parser.add_argument("--hidden-size", type=int, default=HIDDEN, help="a multiple of 64, the size of a head")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(SCALED_WAYS)[1:], help="beside the ideal")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--device-mib", type=float, help="default: half of what the ideal takes")
    parser.add_argument("--host-mib", type=float, help="default: no limit")
    options = parser.parse_args()
    hidden = options.hidden_size
    if hidden < 64 or hidden % 64:
        raise SystemExit(f"--hidden-size {hidden} is not a multiple of 64, the size of a head: give 64, 128, ...")
    torch.set_num_threads(1)
    flops = max(device_peak(HardwareConfig(), torch.device("cpu"), torch.float32).flops for _ in range(5))
    rate, journal = link_bytes_per_s(flops, hidden), Journal("scaled_node")
    for over in options.over_hidden:
        about = {"hidden_size": hidden, "length_over_hidden": over, "one_node": options.device_mib is not None}
        about |= {"peak_gflops": flops / 1e9, "link_mb_per_s": rate / 1e6}
        for row in at_length(options, rate, over):
            journal.replace({**about, **row}, "hidden_size", "length_over_hidden", "one_node", "way")


def at_length(options: argparse.Namespace, bytes_per_s: float, over: int) -> list[dict[str, Any]]:
    """The rows of all ways at one length."""
    hidden = options.hidden_size
    shape = {**SHAPE, "hidden_size": hidden, "num_attention_heads": hidden // 64}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        case = Case("ideal", "gpt-tiny", over * hidden, "cpu", shape)
        works = {"ideal": Work(case, bytes_per_s, str(Path(folder) / "layer.json"))}
        pieces = stack.enter_context(Process(of_way(works["ideal"], PIECES)))
        limited = _limited(works["ideal"], options)
        marks = {}
        for way in ("ideal", *options.ways):
            works[way] = of_way(
                works["ideal"] if way in IDEALS else dataclasses.replace(limited, limit_bytes=None), way
            )
            marks[way] = mark(of_way(limited, way))
        running = [way for way in works if options.device_mib is None or way in IDEALS or marks[way] is None]
        processes = {way: stack.enter_context(Process(works[way])) for way in running}
        found, foundations = take_turns(processes, pieces, options.turns)
        ended = {way: process.end() for way, process in processes.items()}
    rows = [_row(works[way], found[way], found["ideal"], ended[way], foundations) for way in running]
    missing = [{"way": way, "seq_length": over * hidden} for way in works if way not in running]
    limits = {"device_bytes": limited.limit_bytes, "host_limit_bytes": limited.host_bytes}
    return [{**row, **limits, "mark": marks[row["way"]]} for row in (*rows, *missing)]


def take_turns(
    processes: dict[str, Process], pieces: Process, turns: int
) -> tuple[dict[str, list[dict[str, Any]]], Pieces]:
    """What each process answered in each turn, and the median of the pieces."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in processes}
    foundations = []
    for turn in range(turns):
        for way in reversed(processes) if turn % 2 else processes:
            found[way].append(processes[way].turn())
        foundations.append(Pieces(**pieces.turn()))
    return found, Pieces.median(foundations)


def of_way(work: Work, way: str) -> Work:
    """The same for another way."""
    return dataclasses.replace(work, case=dataclasses.replace(work.case, way=way))


def _limited(ideal: Work, options: argparse.Namespace) -> Work:
    """With the limits of the node."""
    if options.device_mib is not None:
        device_bytes = int(options.device_mib * MIB)
    else:
        with Process(ideal) as process:
            process.turn()
            device_bytes = int(DEVICE_SHARE * process.end()["device_peak_bytes"])
    host_bytes = None if options.host_mib is None else int(options.host_mib * MIB)
    return dataclasses.replace(ideal, device_bytes=device_bytes, limit_bytes=device_bytes, host_bytes=host_bytes)


def mark(work: Work) -> str | None:
    """How a step under the node's limits ends: "oom", "oohm", or None where it fits."""
    try:
        with Process(work) as process:
            process.turn()
    except NoRoom as error:
        return str(error)
    return None


def _row(
    work: Work, own: Sequence[dict[str, Any]], ideal: Sequence[dict[str, Any]], ended: dict[str, Any], pieces: Pieces
) -> dict[str, Any]:
    steps_s = [turn["step_s"] for turn in own]
    shares = [turn["hidden_share"] for turn in own if turn["hidden_share"] is not None]
    of_ideal = [there["step_s"] / here_s for there, here_s in zip(ideal, steps_s, strict=True)]
    moves = None if ended.pop("stays") else ended["moves"]
    swept = work.case.way in LEAST_MEMORY_WAYS  # of which no piece was measured
    foreseen = None if swept else dataclasses.asdict(foresee(work, NODE, pieces, moves))
    return {
        "way": work.case.way,
        "seq_length": work.case.seq_length,
        "step_s": statistics.median(steps_s),
        "share_of_ideal": statistics.median(of_ideal),
        "share_of_ideal_quartiles": statistics.quantiles(of_ideal, n=4)[::2] if len(of_ideal) > 1 else None,
        "hidden_share": statistics.median(shares) if shares and work.case.way not in IDEALS else None,
        "steps_s": steps_s,
        **ended,
        "foreseen": foreseen,
        "pieces": dataclasses.asdict(pieces),
    }


if __name__ == "__main__":
    main()
