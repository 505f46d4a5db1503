"""Loss curves with and without swapping: does the loss depend on alpha?

Trains a small model from the same weights on the same samples, once without swapping and once for each alpha:

    python benchmarks/swap_convergence.py --image docs/images/swap_convergence.svg

Every loss must be equal to the last bit for all alphas, and for the same layers when nothing moves; the run fails
otherwise. With --device cuda kernels are deterministic: torch's flash attention, and torch's choice for all other
operations. The plain model is trained twice, and the difference between both trainings is printed.

The plain model computes on whole sequences and the token-wise layers on tiles of tokens, so these two may differ by
rounding. With one tile and one microbatch a step the operations are the same, and for models with LayerNorm so are the
bits (an RMSNorm's input gradient is a sum that PyTorch adds up in another order).
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rows
import torch
from resident import keep_everything

from memo import Trainer
from memo.data import build_demo
from memo.report.drawing import check_suffix, panels, save_figure

ALPHAS = (0.0, 0.125, 0.25, 0.5, 1.0)
TILES = 8


@dataclass(frozen=True)
class Run:
    """One training; alpha None: the plain model."""

    name: str
    alpha: float | None
    tiles: int = TILES
    moves: bool = True
    """False: the same layers on the same tiles, with a slot for each layer, so nothing is copied or recomputed."""


PLAIN = Run("no swapping", None)
RUNS = (
    PLAIN,
    Run("no swapping, again", None),
    Run("no swapping, same tiles", 1.0, moves=False),
    *(Run(f"alpha = {alpha:g}", alpha) for alpha in ALPHAS),
    *(Run(f"alpha = {alpha:g}, one tile", alpha, tiles=1) for alpha in (0.0, 1.0)),
)


def train(run: Run, corpus: Path, args: argparse.Namespace) -> list[float]:
    """Train and return the loss of every step."""
    swapping = {} if run.alpha is None else {"offload_tiles": run.tiles}  # ignored without a swap plan
    trainer = Trainer(
        args.model,
        train_data=corpus,
        plan="off" if run.alpha is None else run.alpha,
        **swapping,
        seq_length=args.seq_length,
        micro_batch_size=2,
        params_dtype=args.dtype,
        train_iters=args.steps,
        lr=3e-3,
        lr_warmup_iters=args.steps // 15,
        min_lr=3e-4,
        device=args.device,
        num_threads=args.num_threads,
        attention_backend="flash" if args.device == "cuda" else "auto",
        profile_cache="off",
    )
    if not run.moves:
        keep_everything(trainer)
    return [trainer.step().lm_loss for _ in range(args.steps)]


def make_deterministic() -> None:
    """Make kernels deterministic; call it before the first kernel, because cuBLAS reads its variable when it starts."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


def measure(args: argparse.Namespace, corpus: Path) -> list[dict[str, object]]:
    curves: dict[Run, list[float]] = {}
    results = []
    for run in RUNS:
        start_s = time.perf_counter()
        losses = curves[run] = train(run, corpus, args)
        first = next(other for other in curves if (other.alpha is None, other.tiles) == (run.alpha is None, run.tiles))
        row = {
            "run": run.name,
            "model": args.model,
            "dtype": args.dtype,
            "device_type": args.device,
            "seq_length": args.seq_length,
            "alpha": run.alpha,
            "tiles": run.tiles if run.alpha is not None else None,
            "max_difference_among_alphas": largest_difference(losses, curves[first]),
            "max_difference_from_plain": largest_difference(losses, curves[PLAIN]),
            "train_s": time.perf_counter() - start_s,
        }
        print(json.dumps({**row, "last_loss": losses[-1]}), flush=True)
        results.append({**row, "losses": losses})
    return results


def draw_curves(curves: Mapping[str, Sequence[float]], path: str | Path, x: str, y: str, title: str = "") -> None:
    """Draw a line for each name over 1, 2, 3, ...; the first lines are wider, so that coinciding lines are visible."""
    check_suffix(path)
    figure, (axes,) = panels(path, 6.0, 3.6)
    for index, (name, values) in enumerate(curves.items()):
        wide = 1.0 + 1.6 * (len(curves) - 1 - index)
        axes.plot(range(1, len(values) + 1), values, label=name, linewidth=wide, color=f"C{index}")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(title, fontsize=9, loc="left")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["fp64", "fp32", "bf16"], help="default: fp32 on a CPU, bf16 on CUDA")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--num-threads", type=int, help="of the CPU; default: as the trainer chooses")
    parser.add_argument("--results", default="swap_convergence", help="results/NAME.jsonl to write")
    parser.add_argument("--image", help="where to draw the curves, .svg or .png")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    if args.device == "cuda":
        make_deterministic()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        build_demo(corpus)
        results = measure(args, corpus)
    print(f"kept in {rows.write(args.results, results)}")
    if args.image:
        draw_curves(
            {row["run"]: row["losses"] for row in results if row["tiles"] in (None, TILES)},
            args.image,
            x="step",
            y="loss, nats a byte",
            title=f"{args.model}, {args.steps} steps: the loss does not depend on alpha",
        )
    worst = max(row["max_difference_among_alphas"] for row in results if row["alpha"] is not None)
    again = next(row["max_difference_from_plain"] for row in results if row["run"] == "no swapping, again")
    print(f"largest difference of two runs without swapping: {again:g}")
    print(f"largest difference among alphas: {worst:g}")
    if worst != 0:
        raise SystemExit("losses depend on alpha: token-wise recomputation is not bit-equal here")


if __name__ == "__main__":
    main()
