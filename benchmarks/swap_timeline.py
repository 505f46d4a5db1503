"""The timeline of one real training step under a swap plan (MEMO, Fig. 11), drawn and as a Chrome trace.

On a CPU, copies run in threads beside compute, which gets one core:

    python benchmarks/swap_timeline.py --image docs/images/swap_timeline.svg --trace runs/swap_timeline.json

Prints the measured timeline, and below it what the planner's model of three streams makes of the measured
medians. https://ui.perfetto.dev opens the trace.
"""

import argparse
import dataclasses
import statistics

import rows

from memo import Trainer
from memo.config import preset
from memo.executor.recorder import record
from memo.report.drawing import draw_swaps
from memo.report.perfetto import write_perfetto
from memo.report.timeline import ROWS, SwapSpan, copied_s, draw_text, hidden_share, stalled_s, timeline
from memo.simulate.streams import LayerTimes


def record_step(args: argparse.Namespace) -> tuple[Trainer, list[SwapSpan]]:
    """The trainer, and the spans of its last step; the steps before it warm up."""
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
    )
    assert trainer.parts.swap is not None
    for _ in range(args.warmup):
        trainer.step()
    with record(trainer.parts.swap.swapper) as recorder:
        trainer.step()
    return trainer, recorder.spans()


def median_times(spans: list[SwapSpan]) -> LayerTimes:
    """Of one layer: what the model needs to imitate the run."""

    def median_s(row: str, kind: str) -> float:
        found = [span.duration_s for span in spans if span.row == row and span.step.op.kind == kind]
        return statistics.median(found) if found else 0.0

    return LayerTimes(
        median_s("compute", "F"), median_s("compute", "B"), median_s("offload", "F"), median_s("prefetch", "B")
    )


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
    parser.add_argument("--image", help="where to draw the timeline, .svg or .png")
    parser.add_argument("--trace", help="where to write the Chrome trace")
    args = parser.parse_args()
    trainer, spans = record_step(args)
    assert trainer.parts.swap is not None
    print(f"measured:\n{draw_text(spans)}\n")
    print(f"the model, with the measured medians:\n{timeline(trainer.parts.swap.plan, median_times(spans))}")
    if args.image:
        tokens = f"{args.micro_batch_size} x {args.seq_length} tokens"
        title = f"One training step: {args.layers} layers, {tokens}, alpha = {args.alpha:g}"
        draw_swaps(spans, args.image, title)
    if args.trace:
        write_perfetto(spans, args.trace)
    row = {
        **{f"{row}_s": sum(span.duration_s for span in spans if span.row == row) for row in ROWS},
        "wait_s": stalled_s(spans),
        "copied_s": copied_s(spans),
        "hidden_share": hidden_share(spans),
        "copied_bytes": sum(span.num_bytes for span in spans),
        "alpha": args.alpha,
        "seq_length": args.seq_length,
        "layers": args.layers,
        "microbatches": args.microbatches,
    }
    print(f"kept in {rows.write('swap_timeline', [row])}")


if __name__ == "__main__":
    main()
