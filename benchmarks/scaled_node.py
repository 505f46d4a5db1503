"""A node in small: how much of swapping and recomputation hides behind compute, measured on a CPU with a slow link.

    python benchmarks/scaled_node.py [--over-hidden 16 32 64] [--repeats 2]

What hides depends on two ratios alone: FLOP/s over what the link moves, and the sequence's length over the hidden size.
So one core is the GPU, and copies run in threads that are held to a rate at which a layer's FLOPs and its activations
stand to each other as on NODE (a DMA engine costs the cores nothing: the copy is short, the rest is waiting). At
length / hidden size of 16 to 256 these are the proportions of 64K to 1M tokens with a hidden size of 4,096.

Each row is one way (benchmarks/ways.py) in a fresh process: the seconds of a step, its share of the speed of the ideal
(everything stays, without a limit), and the most that torch allocated, which tells whether the way fits DEVICE_SHARE of
what the ideal takes. Measured on CPU, on the scaled node: no GPU has confirmed it.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from allocated_bytes import AllocatedBytes
from measure import Case, in_fresh_process, tried
from rows import Journal
from torch import Tensor
from ways import WAYS, HostCopies, Way

from memo import Trainer
from memo.config import HardwareConfig
from memo.estimate.machines import find_hardware
from memo.executor.streams import Stream, ThreadStreams
from memo.train import build
from memo.train.device import device_peak
from memo.units import GIB

NODE = find_hardware("a800-80")
NODE_HIDDEN, HIDDEN, LAYERS = 4096, 128, 6
NODE_DTYPE_BYTES, DTYPE_BYTES = 2, 4
DEVICE_SHARE = 0.5
SHAPE = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2, "vocab_size": 512}

QUIET_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc keeps what is freed, as a GPU's allocator does; fresh pages for every tensor would slow down the ideal most."""

_MEMO = {"offload_backend": "threads"}
SCALED_WAYS = {
    "ideal": WAYS["none"],
    "full-recompute": WAYS["full-recompute"],
    "selective-recompute": WAYS["selective-recompute"],
    "layer-input-offload": WAYS["layer-input-offload"],
    "full-swap": Way({"offload_alpha": 1.0, "offload_policy": "paper", **_MEMO}),
    "memo-paper": Way({"offload_alpha": "auto", "offload_policy": "paper", **_MEMO}),
    "memo": Way({"offload_alpha": "auto", **_MEMO}),
}


def link_bytes_per_s(flops: float) -> float:
    """The rate at which a device of `flops` has a link like NODE's.

    Of a layer, FLOPs a token grow with the square of the hidden size and activations with the hidden size, so FLOP/s
    over elements per second may fall with it.
    """
    node = NODE.peak_flops("bf16") / (NODE.offload_gb_per_s * 1e9 / NODE_DTYPE_BYTES)
    return flops / (node * HIDDEN / NODE_HIDDEN) * DTYPE_BYTES


class PacedStreams(ThreadStreams):
    """A link of so many bytes a second in each direction, for the copies of a plan."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: paced(lambda: dst.copy_(src), src.nbytes, self.bytes_per_s))


class PacedCopies(HostCopies):
    """The same link for ways that copy on the stream that computes."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s

    def take(self, x: Tensor) -> Tensor:
        return paced(lambda: super(PacedCopies, self).take(x), x.nbytes, self.bytes_per_s)

    def bring(self, waiting: Tensor, device: torch.device) -> Tensor:
        return paced(lambda: super(PacedCopies, self).bring(waiting, device), waiting.nbytes, self.bytes_per_s)


Result = TypeVar("Result")


def paced(copy: Callable[[], Result], num_bytes: int, bytes_per_s: float) -> Result:
    begin_s = time.perf_counter()
    result = copy()
    time.sleep(max(0.0, num_bytes / bytes_per_s - (time.perf_counter() - begin_s)))
    return result


# In the fresh process.


def take(case: Case, bytes_per_s: float, device_bytes: int | None) -> dict[str, Any]:
    """Steps of one way. `device_bytes`: what memo may use of the device; None: all."""
    way, copies = SCALED_WAYS[case.way], PacedCopies(bytes_per_s)
    flags: dict[str, Any] = {"mock_data": True, "profile_cache": "off", "num_threads": 1, "progress": False}
    flags |= {"seq_length": case.seq_length, "train_iters": case.warmup + case.steps, "device": "cpu"} | way.flags
    if device_bytes is not None and way.flags["offload_alpha"] == "auto":
        flags["device_memory_gib"] = device_bytes / GIB
    backend = mock.patch.object(build, "make_backend", lambda *args, **more: PacedStreams(bytes_per_s))
    with contextlib.ExitStack() as stack:
        stack.enter_context(backend)
        stack.enter_context(tried())
        if flags["offload_alpha"] == "auto":
            flags["layer_profile"] = stack.enter_context(_profile(case, flags, bytes_per_s))
        counter = AllocatedBytes()
        trainer = stack.enter_context(Trainer(case.model, **flags))
        way.prepare(trainer, copies)
        stack.enter_context(way.around(trainer, copies))
        for _ in range(case.warmup):
            trainer.step()
        counter.take_peak_bytes()
        records = [trainer.step() for _ in range(case.steps)]
        moved = trainer.parts.chosen_swap
        return {
            "step_s": statistics.median(record.step_time_s for record in records),
            "steps_s": [record.step_time_s for record in records],
            "device_peak_bytes": counter.take_peak_bytes() - copies.peak_bytes,
            "host_bytes": (records[-1].host_records_bytes or 0) + copies.peak_bytes,
            "hidden_share": records[-1].hidden_share,
            "moves": None if moved is None else moved.solution.tiles,
            "limit": None if moved is None else str(moved.solution.limit),
            "loss": records[-1].lm_loss,
        }


@contextlib.contextmanager
def _profile(case: Case, flags: dict[str, Any], bytes_per_s: float) -> Any:
    """A file with the profile of this core's layer and the node's link, which `memo profile` cannot see."""
    from memo.train import layer_profile

    found: list[Any] = []
    measure = layer_profile.measure

    def note(*args: Any, **more: Any) -> Any:
        found.append(measure(*args, **more))
        return found[-1]

    with tempfile.TemporaryDirectory() as folder, mock.patch("memo.train.swap.measure", note):
        Trainer(case.model, **flags).close()
        rates = dict.fromkeys(layer_profile._RATES, bytes_per_s)
        path = Path(folder) / "layer.json"
        dataclasses.replace(found[0], **rates).save(path)
        yield str(path)


# In the first process.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over-hidden", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        case, rate, device_bytes = json.loads(options.run)
        print(json.dumps(take(Case(**case), rate, device_bytes)))
        return
    torch.set_num_threads(1)
    flops = device_peak(HardwareConfig(), torch.device("cpu"), torch.float32).flops
    journal = Journal("scaled_node")
    for over in options.over_hidden:
        for row in at_length(over, link_bytes_per_s(flops), options.repeats, options.steps):
            journal.add({"peak_gflops": flops / 1e9, "link_mb_per_s": link_bytes_per_s(flops) / 1e6, **row})


def at_length(over: int, bytes_per_s: float, repeats: int, steps: int) -> list[dict[str, Any]]:
    """The rows of all ways at one length, whose processes take turns `repeats` times."""
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in SCALED_WAYS}
    device_bytes: int | None = None
    for _ in range(repeats):
        for way in SCALED_WAYS:
            case = Case(way, "gpt-tiny", over * HIDDEN, "cpu", SHAPE, warmup=1, steps=steps)
            argument = json.dumps([dataclasses.asdict(case), bytes_per_s, device_bytes])
            taken[way].append(in_fresh_process([sys.executable, __file__, "--run", argument], 3600, QUIET_MALLOC))
            if device_bytes is None:  # the ideal is the first
                device_bytes = int(DEVICE_SHARE * taken[way][0]["device_peak_bytes"])
    ideal_s = statistics.median(row["step_s"] for row in taken["ideal"])
    return [_summary(way, over, rows, ideal_s, device_bytes) for way, rows in taken.items()]


def _summary(
    way: str, over: int, rows: list[dict[str, Any]], ideal_s: float, device_bytes: int | None
) -> dict[str, Any]:
    about = {"way": way, "length_over_hidden": over, "seq_length": over * HIDDEN, "device_bytes": device_bytes}
    if any("step_s" not in row for row in rows):
        return {**about, "status": "failed", "rows": rows}
    seconds = [row["step_s"] for row in rows]
    last = rows[-1]
    return {
        **about,
        "step_s": statistics.median(seconds),
        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
        "share_of_ideal": ideal_s / statistics.median(seconds),
        "fits": last["device_peak_bytes"] <= (device_bytes or 0),
        **{name: last[name] for name in ("device_peak_bytes", "host_bytes", "hidden_share", "moves", "limit", "loss")},
    }


if __name__ == "__main__":
    main()
