"""One training step of 262,144 tokens in 104 MiB of device memory, as a user would start it: `memo train` on a CPU.

    python benchmarks/quarter_million.py --folder DIR

Three runs of one step each, in fresh processes. Whole layers are refused, because they take more memory than allowed.
Layers that are swept along the sequence fit: in the second run with their records in host memory, in the third with
most records in a file in DIR. Both runs must give the same loss and norm of the gradient to the last bit; exit status 1
if they do not. A run takes five to ten minutes on two cores, nearly all of it in attention.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rows

LENGTH = 1 << 18
CAP_GIB = 0.102
SHAPE = {
    "model": "llama-tiny",
    "num-layers": 2,
    "hidden-size": 16,
    "num-attention-heads": 1,
    "num-query-groups": 1,
    "ffn-hidden-size": 48,
    "vocab-size": 512,
}
RUN = {
    "seq-length": LENGTH,
    "global-batch-size": 1,
    "train-iters": 1,
    "params-dtype": "fp32",
    "device": "cpu",
    "offload-alpha": 0,
    "device-memory-gib": CAP_GIB,
    "peak-tflops": 0.1,
}
SWEPT = {"offload-granularity": "tile", "offload-tiles": 256, "offload-slot-tiles": 1, "offload-hidden-states": True}
HOST_GIB = 0.02
"""Host memory of the run with a disk: hidden states, which never go to the disk, take 0.0156, and records the rest."""
TIMEOUT_S = 3600


def train(log: Path, **flags: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "memo", "train", "--mock-data", "--no-progress", "--log-jsonl", str(log)]
    for name, value in {**SHAPE, **RUN, **flags}.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=rows.ROOT, check=False)


def refused(folder: Path) -> dict[str, Any]:
    """Run whole layers; the row has the message of the refusal, with the memory that they need."""
    done = train(folder / "whole.jsonl")
    if done.returncode == 0:
        raise SystemExit(f"whole layers fit in {CAP_GIB} GiB, so nothing is shown by layers that are swept")
    return {"way": "whole layers", "status": done.returncode, "message": done.stderr.strip().splitlines()[-1]}


def trained(way: str, folder: Path, **flags: object) -> dict[str, Any]:
    log, begin_s = folder / f"{way.replace(' ', '_')}.jsonl", time.perf_counter()
    done = train(log, **SWEPT, **flags)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr.strip()}")
    record = json.loads(log.read_text().splitlines()[0])
    names = ("lm_loss", "grad_norm", "step_time_s", "rounding_buffers_bytes", "host_records_bytes")
    return {"way": way, "status": 0, "run_s": time.perf_counter() - begin_s, **{name: record[name] for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="directory on the disk that is to hold records")
    folder = parser.parse_args().folder
    about = {"seq_length": LENGTH, "device_cap_gib": CAP_GIB}
    journal = rows.Journal("quarter_million")
    journal.rows = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        here = Path(scratch)
        journal.add({**about, **refused(here)})
        in_memory = journal.add({**about, **trained("swept", here)})
        disk = {"offload-nvme-path": scratch, "offload-host-memory-gib": HOST_GIB}
        on_disk = journal.add({**about, **trained("swept, records on a disk", here, **disk)})
    if any(in_memory[name] != on_disk[name] for name in ("lm_loss", "grad_norm")):
        raise SystemExit("the runs in host memory and on the disk differ")


if __name__ == "__main__":
    main()
