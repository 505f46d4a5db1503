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
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 257".split()


def measure(seq_length: int, ranks: int) -> dict[str, float | int]:
    """Two steps on `ranks` context-parallel ranks; figures of the second, memory of rank 0."""
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
        "mfu_percent": last["mfu_percent"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--cp", type=int, default=2)
    args = parser.parse_args()
    results = [measure(length, args.cp) for length in sorted(args.lengths)]
    first, last = results[0], results[-1]
    for row in results:
        share = (row["seq_length"] - first["seq_length"]) / max(1, last["seq_length"] - first["seq_length"])
        line = first["peak_bytes_per_rank"] + share * (
            last["peak_bytes_per_rank"] - first["peak_bytes_per_rank"]
        )
        row["peak_over_linear"] = row["peak_bytes_per_rank"] / line
        print(json.dumps(row))
    print(f"kept in {rows.write('long_sequence', results)}")


if __name__ == "__main__":
    main()
