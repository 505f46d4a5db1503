"""A small model of a GPU node: how much of the copies hides behind compute, measured on a CPU with a slow link.

    python benchmarks/scaled_node.py --over-hidden 16 --turns 10
    python benchmarks/scaled_node.py --hidden-size 64 --over-hidden 256 --turns 4
    python benchmarks/scaled_node.py --node h100-80 --over-hidden 16 --turns 8 \
        --ways full-recompute layer-input-offload alst full-swap memo
    python benchmarks/scaled_node.py --device-mib 48 --host-mib 154 --hidden-size 64 --over-hidden 64 128 256 \
        --ways full-recompute layer-input-offload alst full-swap memo memo-swept --turns 3

The hidden share depends on two ratios only: FLOP/s of compute over bytes/s of the link, and the sequence's length over
the hidden size. So one core stands for the GPU, and copies run in threads that are slowed down until a layer's FLOPs
and its activations are in the proportion of the node that --node names. Most of such a copy is waiting, so it costs the
cores as little as a DMA engine. Lengths of 16 to 256 times the hidden size have the proportions of 64K to 1M tokens
with a hidden size of 4,096. A smaller hidden size makes the longest runs affordable: at a given ratio the time of a
step grows with the cube of the hidden size.

All ways but whole-layers compute by the same operations on the same tiles (benchmarks/rivals.py). A core's speed drifts
by a tenth within minutes. So each way is a process of its own, and all ways take turns, one step each, in one order and
then in the reverse order. A ratio is the median over turns of the ratio of two steps of one turn; the spread over turns
is kept beside it.

Each way runs against a limit of memory, which shows whether it fits: half of the ideal's memory, or --device-mib and
--host-mib, with which only ways that fit take turns. Each row has the values that were foreseen from pieces of a step
that took turns as well (benchmarks/scaled_foresight.py). Measured on a CPU, on the scaled node: no GPU has confirmed
it.

Rows replace earlier rows of the same node, length, hidden size and kind of limit.
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
from scaled_steps import IDEALS, LEAST_MEMORY_WAYS, SCALED_WAYS, Work

from memo.config import HardwareConfig
from memo.estimate.hardware import Hardware
from memo.estimate.machines import find_hardware
from memo.train.device import device_peak

NODES = ("a800-80", "h100-80")
NODE = find_hardware(NODES[0])
NODE_HIDDEN, HIDDEN, LAYERS = 4096, 128, 6
NODE_DTYPE_BYTES, DTYPE_BYTES = 2, 4
DEVICE_SHARE = 0.5
SHAPE = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HIDDEN // 64, "vocab_size": 512}
MIB = 1 << 20
WAYS = [way for way in (*SCALED_WAYS, *LEAST_MEMORY_WAYS) if way != "ideal"]
DEFAULT_WAYS = [way for way in SCALED_WAYS if way not in ("ideal", "whole-layers-recompute")]


def link_bytes_per_s(flops: float, hidden: int = HIDDEN, node: Hardware = NODE) -> float:
    """Return the rate of a link that is to a device of `flops` and a model of `hidden` size as the node's link is.

    FLOPs a token of a layer grow with the square of the hidden size, and its activations with the hidden size. So
    FLOP/s over elements per second may fall in proportion to the hidden size.
    """
    of_node = node.peak_flops("bf16") / (node.offload_gb_per_s * 1e9 / NODE_DTYPE_BYTES)
    return flops / (of_node * hidden / NODE_HIDDEN) * DTYPE_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over-hidden", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--hidden-size", type=int, default=HIDDEN, help="a multiple of 64, the size of a head")
    parser.add_argument("--node", choices=NODES, default=NODE.name, help="whose proportions the link has")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=DEFAULT_WAYS, help="beside the ideal")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--device-mib", type=float, help="default: half of what the ideal takes")
    parser.add_argument("--host-mib", type=float, help="default: no limit")
    options = parser.parse_args()
    hidden, node = options.hidden_size, find_hardware(options.node)
    if hidden < 64 or hidden % 64:
        raise SystemExit(f"--hidden-size {hidden} is not a multiple of 64, the size of a head: give 64, 128, ...")
    if options.turns < 2:
        raise SystemExit(f"--turns {options.turns} leaves no quartiles to tell of: give 2 or more")
    torch.set_num_threads(1)
    flops = max(device_peak(HardwareConfig(), torch.device("cpu"), torch.float32).flops for _ in range(5))
    rate, journal = link_bytes_per_s(flops, hidden, node), Journal("scaled_node")
    proportion = node.peak_flops("bf16") / 1e12 / node.offload_gb_per_s
    for over in options.over_hidden:
        about = {"hidden_size": hidden, "length_over_hidden": over, "one_node": options.device_mib is not None}
        about |= {"node": node.name, "node_tflops_per_gb_per_s": proportion}
        about |= {"peak_gflops": flops / 1e9, "link_mb_per_s": rate / 1e6}
        for row in at_length(options, node, rate, over):
            journal.replace({**about, **row}, "hidden_size", "length_over_hidden", "one_node", "node", "way")


def at_length(options: argparse.Namespace, node: Hardware, bytes_per_s: float, over: int) -> list[dict[str, Any]]:
    """Return the rows of all ways at one length."""
    hidden = options.hidden_size
    shape = {**SHAPE, "hidden_size": hidden, "num_attention_heads": hidden // 64}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        case = Case("ideal", "gpt-tiny", over * hidden, "cpu", shape)
        ideal = Work(case, bytes_per_s, str(Path(folder) / "layer.json"))
        pieces = stack.enter_context(Process(of_way(ideal, PIECES)))
        runs = {"ideal": Run(stack, ideal)}
        limited = _limited(ideal, options, runs["ideal"])
        for way in options.ways:
            work = of_way(ideal if way in IDEALS else limited, way)
            runs[way] = Run(stack, work, goes_on=options.device_mib is None)
        foundations = take_turns(list(runs.values()), pieces, options.turns)
        rows = [_row(run, runs["ideal"], node, foundations) for run in runs.values()]
    limits = {"device_bytes": limited.limit_bytes, "host_limit_bytes": limited.host_bytes}
    return [{**row, **limits} for row in rows]


class Run:
    """The turns of one way: within its limits until it exceeds them, then without limits unless `goes_on` is False."""

    def __init__(self, stack: contextlib.ExitStack, work: Work, goes_on: bool = True) -> None:
        """`stack`: closes the processes of this run."""
        self.work, self.mark = work, None
        self.found: list[dict[str, Any]] = []
        self._stack, self._goes_on = stack, goes_on
        self._process: Process | None = None
        try:
            self._begin()
        except NoRoom as error:
            self._begin_without_limits(error)

    def turn(self) -> dict[str, Any] | None:
        """Take a turn; return the answer of the process, or None if the way ran out of memory and does not go on."""
        if self._process is None:
            return None
        try:
            return self._process.turn()
        except NoRoom as error:
            self._begin_without_limits(error)
            return self.turn()

    def take_turn(self) -> None:
        answer = self.turn()
        if answer is not None:
            self.found.append(answer)

    def end(self) -> dict[str, Any]:
        assert self._process is not None
        return self._process.end()

    def _begin(self) -> None:
        self._process = self._stack.enter_context(Process(self.work))

    def _begin_without_limits(self, error: NoRoom) -> None:
        self.mark, self._process = str(error), None
        if self._goes_on:
            self.work = dataclasses.replace(self.work, device_bytes=None, limit_bytes=None, host_bytes=None)
            self._begin()


def take_turns(runs: Sequence[Run], pieces: Process, turns: int) -> Pieces:
    """Let every run take `turns` turns, in one order and then in the reverse one; return the median of the pieces."""
    foundations = []
    for turn in range(turns):
        for run in reversed(runs) if turn % 2 else runs:
            run.take_turn()
        foundations.append(Pieces(**pieces.turn()))
    return Pieces.median(foundations)


def of_way(work: Work, way: str) -> Work:
    """Return the work of another way."""
    return dataclasses.replace(work, case=dataclasses.replace(work.case, way=way))


def _limited(work: Work, options: argparse.Namespace, ideal: Run) -> Work:
    """Return the work with the limits of the node."""
    if options.device_mib is not None:
        device_bytes = int(options.device_mib * MIB)
    else:
        told = ideal.turn()
        assert told is not None, "the ideal has no limit"
        device_bytes = int(DEVICE_SHARE * told["device_peak_bytes"])
    host_bytes = None if options.host_mib is None else int(options.host_mib * MIB)
    return dataclasses.replace(work, device_bytes=device_bytes, limit_bytes=device_bytes, host_bytes=host_bytes)


def _row(run: Run, ideal: Run, node: Hardware, pieces: Pieces) -> dict[str, Any]:
    way = run.work.case.way
    about = {"way": way, "seq_length": run.work.case.seq_length, "mark": run.mark}
    if not run.found:
        return about
    steps_s = [turn["step_s"] for turn in run.found]
    shares = [turn["hidden_share"] for turn in run.found if turn["hidden_share"] is not None]
    of_ideal = [there["step_s"] / here_s for there, here_s in zip(ideal.found, steps_s, strict=True)]
    ended = run.end()
    moves = None if ended.pop("stays") else ended["moves"]
    swept = way in LEAST_MEMORY_WAYS  # no pieces of these ways were measured
    foreseen = None if swept else dataclasses.asdict(foresee(run.work, node, pieces, moves))
    return {
        **about,
        "step_s": statistics.median(steps_s),
        "share_of_ideal": statistics.median(of_ideal),
        "share_of_ideal_quartiles": statistics.quantiles(of_ideal, n=4)[::2],
        "hidden_share": statistics.median(shares) if shares else None,
        "steps_s": steps_s,
        **ended,
        "foreseen": foreseen,
        "pieces": dataclasses.asdict(pieces),
    }


if __name__ == "__main__":
    main()
