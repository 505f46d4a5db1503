"""Measures the longest sequence of each way in the scaled node's device memory: bytes, not times.

    python benchmarks/scaled_longest.py [--device-mib 134]

The memory that torch allocates in a step is a constant and a part that grows linearly with the sequence. So each way is
measured at two short lengths. The line through them gives the longest sequence under the limit, in multiples of 1,024
tokens, which is trained and measured as well; by this line the next longer sequence is above the limit. Swept layers
have their hidden states in host memory, as `--offload-granularity auto` does if little memory is free.

A way's row replaces its earlier row.
"""

import argparse
from typing import Any

import rows
from measure import Case
from scaled_node import DTYPE_BYTES, HIDDEN, LAYERS, MIB, SHAPE
from scaled_process import Process
from scaled_steps import LEAST_MEMORY_WAYS, SCALED_WAYS, Work

WAYS = [*(way for way in SCALED_WAYS if not way.startswith("memo")), *LEAST_MEMORY_WAYS]
UNIT = 1024
SHORT = (4 * UNIT, 6 * UNIT)
ANY_RATE = 1e12
"""Rate of the link, which does not matter: only bytes are measured."""


def measured_bytes(way: str, seq_length: int) -> int:
    case = Case(way, "gpt-tiny", seq_length, "cpu", SHAPE)
    with Process(Work(case, ANY_RATE, "")) as process:
        process.turn()
        return int(process.end()["device_peak_bytes"])


def longest(way: str, device_bytes: int) -> dict[str, Any]:
    short = [measured_bytes(way, seq_length) for seq_length in SHORT]
    of_a_token = (short[1] - short[0]) / (SHORT[1] - SHORT[0])
    most = SHORT[0] + (device_bytes - short[0]) / of_a_token
    seq_length = int(most) // UNIT * UNIT
    peak_bytes = measured_bytes(way, seq_length)
    return {
        "way": way,
        "device_bytes": device_bytes,
        "bytes_a_token": of_a_token,
        "in_input_sizes": of_a_token / (HIDDEN * DTYPE_BYTES),
        "layers": LAYERS,
        "seq_length": seq_length,
        "peak_bytes": peak_bytes,
        "fits": peak_bytes <= device_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-mib", type=float, default=134.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    journal = rows.Journal("scaled_longest")
    for way in options.ways:
        journal.replace(longest(way, int(options.device_mib * MIB)), "way")


if __name__ == "__main__":
    main()
