"""The two sizes of every benchmark of the set: smoke, which proves on a CPU that scripts run, and full, on CUDA.

Figures of the smoke size say nothing about speed: its models are tiny, and a CPU computes and copies with the same
cores.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

K = 1024


@dataclass(frozen=True)
class Shape:
    """A preset (memo.config.presets) with some of its fields changed."""

    preset: str
    fields: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Scale:
    """The runs of the scripts at one size. Lengths are tokens of a sequence.

    Attributes:
        rank: the model of which a single rank is trained, without communication.
        world: value of --simulate-world.
        lengths: lengths of sequences.
        ablation_length: length in table 4 and in the table of allocators.
        alphas: shares of the tokens whose copies `overlap` times.
        whole: models that are trained whole, with all layers on one device, by name.
        reach_from, reach_to: the shortest and the longest sequence that `reach` tries.
        peer: a whole model of a family that transformers has.
        peer_lengths: lengths for peers.
        streamed: models whose states may be in host memory, by name.
        only_planned: models whose states fit neither on the device alone nor on the host alone.
        streamed_length: length for models with streamed states.
        steps: number of measured steps, after `warmup` steps.
        convergence_steps: number of steps of each run for losses.
        timeout_s: seconds after which a run is ended.
        flags: flags of the trainer in every run.
    """

    name: str
    device: str
    rank: Shape
    world: str
    lengths: tuple[int, ...]
    ablation_length: int
    alphas: tuple[float, ...]
    whole: dict[str, Shape]
    reach_from: int
    reach_to: int
    peer: Shape
    peer_lengths: tuple[int, ...]
    streamed: dict[str, Shape]
    only_planned: dict[str, Shape]
    streamed_length: int
    warmup: int
    steps: int
    convergence_steps: int
    timeout_s: float
    flags: tuple[tuple[str, Any], ...] = ()


_GPT_1_3B = (("num_layers", 24), ("hidden_size", 2048), ("num_attention_heads", 16))
_LLAMA_1_3B = (
    *_GPT_1_3B,
    ("num_query_groups", 16),
    ("ffn_hidden_size", 5504),
    ("vocab_size", 32000),
    ("max_position_embeddings", 1024 * K),
)

FULL = Scale(
    name="full",
    device="cuda",
    rank=Shape("gpt-7b", (("num_layers", 4),)),
    world="tp=8",
    lengths=(64 * K, 128 * K, 256 * K, 512 * K, 1024 * K),
    ablation_length=256 * K,
    alphas=(0.0, 0.25, 0.5, 1.0),
    whole={"gpt-1.3b": Shape("gpt-7b", _GPT_1_3B), "gpt-7b": Shape("gpt-7b")},
    reach_from=32 * K,
    reach_to=1024 * K,
    peer=Shape("llama-tiny", _LLAMA_1_3B),
    peer_lengths=(16 * K, 32 * K, 64 * K, 128 * K),
    streamed={"gpt-7b": Shape("gpt-7b")},
    only_planned={"gpt-13b": Shape("gpt-13b")},
    streamed_length=32 * K,
    warmup=1,
    steps=3,
    convergence_steps=200,
    timeout_s=600.0,
)

SMOKE = Scale(
    name="smoke",
    device="cpu",
    rank=Shape("gpt-tiny", (("num_layers", 2),)),
    world="tp=2",
    lengths=(512, 1024),
    ablation_length=1024,
    alphas=(0.5,),
    whole={"gpt-tiny": Shape("gpt-tiny")},
    reach_from=2048,
    reach_to=2048,
    peer=Shape("llama-tiny", (("num_layers", 2), ("vocab_size", 512))),
    peer_lengths=(512,),
    streamed={"gpt-tiny": Shape("gpt-tiny", (("vocab_size", 512),))},
    only_planned={},
    streamed_length=512,
    warmup=1,
    steps=2,
    convergence_steps=4,
    timeout_s=120.0,
    flags=(("num_threads", 1),),  # operations are tiny: synchronization of threads would be most of a step
)

SCALES = {scale.name: scale for scale in (SMOKE, FULL)}


@dataclass(frozen=True)
class Arguments:
    """Arguments of every script of the set."""

    scale: Scale
    deadline_s: float

    @property
    def left_s(self) -> float:
        """Seconds until the last run must have ended."""
        return self.deadline_s - time.monotonic()


def parser(doc: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--scale", choices=["auto", *SCALES], default="auto", help="auto: full where CUDA is, else smoke"
    )
    found.add_argument("--minutes", type=float, help="begin nothing later, and end what runs then; default: no limit")
    return found


def arguments(doc: str) -> Arguments:
    return resolve(parser(doc).parse_args())


def resolve(args: argparse.Namespace) -> Arguments:
    """Return the arguments; end the program with status 2 if the full size is asked for without CUDA."""
    name = args.scale
    if name == "auto":
        name = "full" if torch.cuda.is_available() else "smoke"
    if SCALES[name].device == "cuda" and not torch.cuda.is_available():
        print("--scale full needs a CUDA device, and torch finds none: give --scale smoke", file=sys.stderr)
        raise SystemExit(2)
    seconds = float("inf") if args.minutes is None else 60.0 * args.minutes
    return Arguments(SCALES[name], time.monotonic() + seconds)
