"""Device memory of a training step against the length of the sequence, for whole layers, swept layers, and swept layers
with hidden states in host memory.

    python benchmarks/sweep_memory.py [--lengths 8192 16384 32768 65536] [--ways layer tile hidden]

Each length is trained for two steps on a CPU, in fresh processes, and measured by torch's own allocations; the second
step counts. Tiles of swept layers have TILE tokens at every length, so only tensors as long as the sequence grow. A row
has the measured and the foreseen peak, and the bytes of each token beyond the shortest sequence.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import rows
import torch

TILE = 1024
ALPHA = 0.0
LAYERS, HEADS, HEAD_DIM = 8, 2, 16  # few heads, because attention takes nearly all the time
FLAGS: dict[str, object] = {
    "num_layers": LAYERS,
    "hidden_size": 64,
    "num_attention_heads": HEADS,
    "kv_channels": HEAD_DIM,
    "num_query_groups": 1,
    "ffn_hidden_size": 176,
    "vocab_size": 512,
    "loss_chunk_size": 512,
    "train_iters": 2,
    "offload_alpha": ALPHA,
}
WAYS: dict[str, dict[str, object]] = {
    "layer": {},
    "tile": {"offload_granularity": "tile", "offload_slot_tiles": 1},
    "hidden": {"offload_granularity": "tile", "offload_slot_tiles": 1, "offload_hidden_states": True},
}
"""layer: whole layers. tile: swept layers. hidden: swept layers with hidden states in host memory."""
KEY_VALUE_BYTES = 4 * HEAD_DIM * 4
"""Bytes of a token's keys, values and their gradients, fp32, one head each."""


def flags(way: str, length: int) -> dict[str, object]:
    tiles = {"offload_tiles": length // TILE} if way != "layer" else {}
    return {**FLAGS, **WAYS[way], **tiles, "seq_length": length}


def measured(way: str, length: int) -> dict[str, Any]:
    """Run one training in this process, and return its row."""
    from allocated_bytes import AllocatedBytes
    from memory_accuracy import configuration

    import memo
    from memo.estimate.program.memory import program_memory

    torch.set_num_threads(1)
    config, counter = configuration("llama-tiny", 1, flags(way, length)), AllocatedBytes()
    foreseen = program_memory(config, 1, 0)
    with memo.Trainer(config=config) as trainer:
        trainer.step()
        counter.take_peak_bytes()
        record = trainer.step()
        peak_bytes = counter.take_peak_bytes()
    beside = foreseen.states.device
    return {
        "granularity": way,
        "seq_length": length,
        "measured_bytes": peak_bytes,
        "foreseen_bytes": foreseen.total,
        "bytes_a_token": (peak_bytes - beside) / length,
        "lm_loss": record.lm_loss,
    }


def _part(way: str, length: int) -> str:
    """Return the name of the rows of one process."""
    return f"sweep_memory_{way}_{length}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384, 32768, 65536])
    parser.add_argument("--run", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    if options.run:
        way, length = options.run
        rows.Journal(_part(way, int(length))).add(measured(way, int(length)))
        return
    journal = rows.Journal("sweep_memory")
    for way in options.ways:
        peaks: dict[int, int] = {}
        for length in options.lengths:
            part = _part(way, length)
            subprocess.run([sys.executable, __file__, "--run", way, str(length)], check=True, stdout=subprocess.DEVNULL)
            (row,) = rows.read(part)
            (rows.RESULTS / f"{part}.jsonl").unlink()
            peaks[length] = row["measured_bytes"]
            first, last = min(peaks), max(peaks)
            if length == last > first:
                growth = (peaks[last] - peaks[first]) / (last - first)
                row |= {"growth_bytes_a_token": growth, "over_keys_and_values": growth / KEY_VALUE_BYTES}
            journal.replace(row, "granularity", "seq_length")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
