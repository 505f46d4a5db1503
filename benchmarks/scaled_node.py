"""A node in small: how much of swapping and recomputation hides behind compute, measured on a CPU with a slow link.

    python benchmarks/scaled_node.py [--over-hidden 16 32 64] [--hidden-size 128] [--repeats 3]

What hides depends on two ratios alone: FLOP/s over what the link moves, and the sequence's length over the hidden size.
So one core is the GPU, and copies run in threads that are held to a rate at which a layer's FLOPs and its activations
stand to each other as on NODE (a DMA engine costs the cores nothing: the copy is short, the rest is waiting). At
length / hidden size of 16 to 256 these are the proportions of 64K to 1M tokens with a hidden size of 4,096. A smaller
hidden size makes the longest of them affordable: a step takes time in proportion to its cube.

Each row is one way (benchmarks/ways.py), whose processes take turns with those of the others: the quickest step (what
else a machine does only adds to it; the median stands beside it), its share of the speed of the ideal (everything
stays, without a limit), and the most that torch allocated, which tells whether the way fits DEVICE_SHARE of what the
ideal takes. Beside it stands what was foreseen (benchmarks/scaled_foresight.py).
Measured on CPU, on the scaled node: no GPU has confirmed it.

Rows of the lengths and the hidden size that are run take the place of earlier ones.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import Case, in_fresh_process
from rows import Journal
from scaled_foresight import foresee
from scaled_steps import SCALED_WAYS, Pieces, Work

from memo.artifacts.layer_profile import LayerProfile
from memo.config import HardwareConfig
from memo.estimate.machines import find_hardware
from memo.train.device import device_peak

NODE = find_hardware("a800-80")
NODE_HIDDEN, HIDDEN, LAYERS = 4096, 128, 6
NODE_DTYPE_BYTES, DTYPE_BYTES = 2, 4
DEVICE_SHARE = 0.5
SHAPE = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HIDDEN // 64, "vocab_size": 512}
TIMEOUT_S = 3600

QUIET_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc keeps what is freed, as a GPU's allocator does; fresh pages for every tensor would slow down the ideal most."""


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
    parser.add_argument("--ways", nargs="+", choices=SCALED_WAYS, default=list(SCALED_WAYS), help="beside the ideal")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps-s", type=float, default=8.0, help="a process runs steps for so long, and at least two")
    options = parser.parse_args()
    ways = list(dict.fromkeys(["ideal", *options.ways]))  # of which all others are shares, and which sets the limit
    torch.set_num_threads(1)
    flops = max(device_peak(HardwareConfig(), torch.device("cpu"), torch.float32).flops for _ in range(5))
    hidden = options.hidden_size
    if hidden < 64 or hidden % 64:
        raise SystemExit(f"--hidden-size {hidden} is not a multiple of 64, the size of a head: give 64, 128, ...")
    rate, journal = link_bytes_per_s(flops, hidden), Journal("scaled_node")
    for over in options.over_hidden:
        about = {"hidden_size": hidden, "length_over_hidden": over}
        about |= {"peak_gflops": flops / 1e9, "link_mb_per_s": rate / 1e6}
        for row in at_length(over, hidden, rate, ways, options.repeats, options.steps_s):
            journal.replace({**about, **row}, "hidden_size", "length_over_hidden", "way")


def at_length(
    over: int, hidden: int, bytes_per_s: float, ways: list[str], repeats: int, steps_s: float
) -> list[dict[str, Any]]:
    """The rows of all ways at one length."""
    shape = {**SHAPE, "hidden_size": hidden, "num_attention_heads": hidden // 64}
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "layer.json"
        case = Case("ideal", "gpt-tiny", over * hidden, "cpu", shape, warmup=1, steps=2)
        work = Work(case, bytes_per_s, str(profile), steps_s=steps_s)
        measured = [_run(dataclasses.replace(work, pieces=True))]
        for _ in range(repeats):
            for way in ways:
                taken[way].append(_run(dataclasses.replace(work, case=dataclasses.replace(case, way=way))))
                if work.device_bytes is None:  # the ideal is the first
                    work = dataclasses.replace(
                        work, device_bytes=int(DEVICE_SHARE * taken[way][0]["device_peak_bytes"])
                    )
            measured.append(_run(dataclasses.replace(work, pieces=True)))
        pieces = min((Pieces(**found) for found in measured), key=lambda found: found.forward_s + found.backward_s)
        layer = LayerProfile.load(profile)
    ideal_s = _step_s(taken["ideal"])
    found = []
    for way in ways:
        work = dataclasses.replace(work, case=dataclasses.replace(case, way=way))
        found.append({"way": way, **_row(work, taken[way], ideal_s), **_foreseen(work, pieces, layer, taken[way])})
    return found


def _run(work: Work) -> dict[str, Any]:
    script = Path(__file__).with_name("scaled_steps.py")
    argument = json.dumps(dataclasses.asdict(work))
    found = in_fresh_process([sys.executable, str(script), argument], TIMEOUT_S, QUIET_MALLOC)
    if "message" in found:
        raise SystemExit(f"{work.case.way}: {found['message']}")
    return found


def _step_s(taken: list[dict[str, Any]]) -> float:
    return min(seconds for run in taken for seconds in run["steps_s"])


def _row(work: Work, taken: list[dict[str, Any]], ideal_s: float) -> dict[str, Any]:
    step_s, last = _step_s(taken), taken[-1]
    steps_s = [seconds for run in taken for seconds in run["steps_s"]]
    shares = [share for run in taken for share in run["hidden_shares"]]
    return {
        "seq_length": work.case.seq_length,
        "device_bytes": work.device_bytes,
        "runs": len(taken),
        "steps": len(steps_s),
        "step_s": step_s,
        "median_over_quickest": statistics.median(steps_s) / step_s,
        "share_of_ideal": ideal_s / step_s,
        "fits": last["device_peak_bytes"] <= (work.device_bytes or 0),
        "hidden_share": statistics.median(shares) if shares else None,
        **{name: last[name] for name in ("device_peak_bytes", "host_bytes", "moves", "limit", "loss")},
    }


def _foreseen(work: Work, pieces: Pieces, layer: LayerProfile, taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Beside the pieces from which it was."""
    found = foresee(work, NODE, pieces, layer, None if taken[-1]["stays"] else taken[-1]["moves"])
    fits = None if found.device_peak_bytes is None else found.device_peak_bytes <= (work.device_bytes or 0)
    return {"foreseen": {**dataclasses.asdict(found), "fits": fits}, "pieces": dataclasses.asdict(pieces)}


if __name__ == "__main__":
    main()
