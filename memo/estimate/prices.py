"""What clouds ask for a GPU and an hour: a table with dates, for a first comparison.

Prices change by the week and differ twofold from one cloud to the next, so `memo plan --price-per-gpu-hour` overrules
the table, and machines that it does not list have no price until one is given.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """`source`: who asks it, and when."""

    dollars_per_gpu_hour: float
    source: str


_RUNPOD = "RunPod's lowest list price, 10 March 2026, as deploybase.ai reported it"

PRICES = {
    name: Price(dollars, _RUNPOD)
    for name, dollars in {
        "rtx-3090": 0.22,
        "rtx-4090": 0.34,
        "rtx-5090": 0.69,
        "rtx-pro-6000": 0.89,
        "l4": 0.44,
        "l40": 0.69,
        "l40s": 0.79,
        "a100-80-pcie": 1.19,
        "a100-80": 1.39,
        "h100-80-pcie": 1.99,
        "h100-80": 2.69,
        "h200": 3.59,
        "b200": 5.98,
    }.items()
}
"""By the machine's name."""
