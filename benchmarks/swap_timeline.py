"""The timeline of one real training step under a swap plan (MEMO, Fig. 11), drawn and as a Chrome trace.

On a CPU, copies run in threads beside compute, which gets one core. Memory is so fast for one core that copies would
hardly be visible; on the scaled node (benchmarks/scaled_node.py) both are in the proportion of an A800:

    python benchmarks/swap_timeline.py --scaled-node --hidden-size 128 --seq-length 4096 --micro-batch-size 1 \
        --alpha 0.5 --image docs/images/swap_timeline.svg --trace runs/swap_timeline.json

With --tiles layers are swept, and all further copies beside their sections are drawn as well. Prints the measured
timeline, and below it the timeline that the planner's model of the streams makes of the measured medians.
https://ui.perfetto.dev opens the trace.
"""

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Iterator
from typing import get_args
from unittest import mock

import rows
import torch
from scaled_link import PacedStreams
from scaled_node import link_bytes_per_s
from swap_drawing import draw_swaps, draw_text
from swap_plans import simulate_swaps
from sweep_timeline import SweepTimes, simulate_sweep

from memo import Trainer
from memo.config import HardwareConfig, preset
from memo.report.perfetto import write_perfetto
from memo.report.timeline import ROWS, Kind, SwapSpan, copied_s, hidden_share, stalled_s
from memo.simulate.streams import LayerTimes
from memo.train import build
from memo.train.device import device_peak


@contextlib.contextmanager
def link(args: argparse.Namespace) -> Iterator[None]:
    """Use a link with the proportions of a GPU's with --scaled-node, else the link of this machine."""
    if not args.scaled_node:
        yield
        return
    torch.set_num_threads(1)
    flops = device_peak(HardwareConfig(), torch.device("cpu"), torch.float32).flops
    rate = link_bytes_per_s(flops, args.hidden_size)
    with mock.patch.object(build, "make_backend", lambda *_, **__: PacedStreams(rate)):
        yield


def record_step(args: argparse.Namespace) -> tuple[Trainer, list[SwapSpan]]:
    """Return the trainer, and the spans of its last step; the steps before it warm up."""
    shape = dataclasses.replace(
        preset("gpt-tiny"), num_layers=args.layers, hidden_size=args.hidden_size, num_attention_heads=2
    )
    trainer = Trainer(
        shape,
        plan=args.alpha,
        mock_data=True,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.micro_batch_size * args.microbatches,
        vocab_size=257,
        train_iters=args.warmup + 1,
        offload_policy=args.policy,
        offload_backend="threads" if args.device == "cpu" else "auto",
        device=args.device,
        num_threads=1 if args.device == "cpu" else None,
        **swept(args),
    )
    assert trainer.parts.swap is not None
    for _ in range(args.warmup):
        trainer.step()
    with trainer.parts.swap.recorded() as recorder:
        trainer.step()
    return trainer, recorder.spans()


def swept(args: argparse.Namespace) -> dict[str, object]:
    """Return the flags of swept layers."""
    if not args.tiles:
        return {}
    beside = {"recompute_attention_layers": args.again, "offload_hidden_states": args.hidden_on_host}
    return {"offload_granularity": "tile", "offload_tiles": args.tiles, "offload_slot_tiles": 1, **beside}


def median_times(spans: list[SwapSpan], what: Kind = "activations") -> LayerTimes:
    """Return the median times of one layer or section, from which the model of the streams simulates the run."""

    def median_s(row: str, kind: str) -> float:
        found = [s.duration_s for s in spans if (s.row, s.kind, s.step.op.kind) == (row, what, kind)]
        return statistics.median(found) if found else 0.0

    return LayerTimes(
        median_s("compute", "F"), median_s("compute", "B"), median_s("offload", "F"), median_s("prefetch", "B")
    )


def planned(trainer: Trainer, spans: list[SwapSpan]) -> list[SwapSpan]:
    """Return the spans that the plans alone make of the measured medians."""
    chosen = trainer.parts.chosen_swap
    assert chosen is not None
    if chosen.sweep is None:
        return simulate_swaps(chosen.plan, median_times(spans))
    times = SweepTimes(*(median_times(spans, kind) for kind in get_args(Kind)))
    return simulate_sweep(chosen.plan, chosen.sweep, times, trainer.config.model.num_layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--policy", default="paper", choices=["auto", "paper"])
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--scaled-node", action="store_true", help="hold copies to a rate in a GPU's proportions")
    parser.add_argument("--image", help="where to draw the timeline, .svg or .png")
    parser.add_argument("--plan-image", help="where to draw what the plan alone foresees of it")
    parser.add_argument("--tiles", type=int, help="sweep layers in so many tiles, each of which is a section")
    parser.add_argument("--again", type=int, default=0, help="layers that recompute attention, of those")
    parser.add_argument("--hidden-on-host", action="store_true", help="hidden states in host memory, of those")
    parser.add_argument("--trace", help="where to write the Chrome trace")
    args = parser.parse_args()
    with link(args):
        trainer, spans = record_step(args)
    assert trainer.parts.swap is not None
    print(f"measured:\n{draw_text(spans)}\n")
    model = planned(trainer, spans)
    print(f"the model, with the measured medians:\n{draw_text(model)}")
    tokens = f"{args.micro_batch_size} x {args.seq_length} tokens"
    title = f"One training step: {args.layers} layers, {tokens}, alpha = {args.alpha:g}"
    if args.image:
        draw_swaps(spans, args.image, title)
    if args.plan_image:
        draw_swaps(model, args.plan_image, f"{title}, from the plan")
    if args.trace:
        write_perfetto(spans, args.trace)
    row = {
        **{f"{row}_s": sum(span.duration_s for span in spans if span.row == row) for row in ROWS},
        "wait_s": stalled_s(spans),
        "copied_s": copied_s(spans),
        "hidden_share": hidden_share(spans),
        "copied_bytes": sum(span.num_bytes for span in spans),
        "scaled_node": args.scaled_node,
        "alpha": args.alpha,
        "seq_length": args.seq_length,
        "layers": args.layers,
        "microbatches": args.microbatches,
    }
    print(f"kept in {rows.write('swap_timeline', [row])}")


if __name__ == "__main__":
    main()
