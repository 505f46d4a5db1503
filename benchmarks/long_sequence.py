"""Peak memory and step time against sequence length: is memory linear in s?

Trains a tiny model with context parallelism of 2 through the same path as any other run:

    python benchmarks/long_sequence.py --lengths 16384 32768 65536

The last rows compare each peak with the straight line through the first and the last length.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import rows

SCRIPT = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
MODEL = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--vocab-size", "257"]


def measure(seq_length: int, ranks: int) -> dict[str, float | int]:
    """Run two steps on `ranks` context-parallel ranks; return the figures of the second, and the memory of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launcher, str(SCRIPT), "--mock-data", *MODEL]
        command += ["--seq-len", str(seq_length), "--cp", str(ranks), "--train-iters", "2"]
        subprocess.run([*command, "--log-jsonl", str(log)], check=True, stdout=subprocess.DEVNULL)
        last = json.loads(log.read_text().splitlines()[-1])
    return {
        "seq_length": seq_length,
        "cp": ranks,
        "peak_bytes_per_rank": last["host_peak_bytes"],
        "step_time_s": last["step_time_s"],
        "tgs": last["tgs"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--cp", type=int, default=2)
    args = parser.parse_args()
    results = [measure(length, args.cp) for length in sorted(args.lengths)]
    lengths = [row["seq_length"] for row in results]
    peaks = [row["peak_bytes_per_rank"] for row in results]
    bytes_per_token = (peaks[-1] - peaks[0]) / max(1, lengths[-1] - lengths[0])
    for row, length, peak in zip(results, lengths, peaks, strict=True):
        row["peak_over_linear"] = peak / (peaks[0] + bytes_per_token * (length - lengths[0]))
        print(json.dumps(row))
    print(f"kept in {rows.write('long_sequence', results)}")


if __name__ == "__main__":
    main()
