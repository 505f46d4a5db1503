"""Prices of clouds for a GPU and an hour, spot and on demand: a table with dates, for a first comparison.

A spot machine may be taken away at a few minutes' notice, so plans for training of days use the price on demand. Prices
change by the week and differ twofold from one cloud to the next, so `memo plan --price-per-gpu-hour` overrules the
table; machines that it does not list have no price until one is given.
"""

from typing import NamedTuple


class Price(NamedTuple):
    """Dollars for a GPU and an hour.

    Attributes:
        kind: whether `dollars_per_gpu_hour` is a price on demand, or as given.
        source: who asks this price, and when.
        spot_dollars: price of the same machine while nobody pays more; None if unknown.
    """

    dollars_per_gpu_hour: float
    kind: str
    source: str = ""
    spot_dollars: float | None = None

    def __str__(self) -> str:
        return f"${self.dollars_per_gpu_hour:.2f} a GPU and hour {self.kind}"

    @property
    def told(self) -> str:
        """The price with its source and the spot price."""
        spot = "" if self.spot_dollars is None else f"; ${self.spot_dollars:.2f} spot, where a run may be cut off"
        source = f" ({self.source})" if self.source else ""
        return f"{self}{source}{spot}"


_RUNPOD = "RunPod, 10 March 2026, as deploybase.ai reported it; large clouds asked up to $6.88 for an H100"

PRICES = {
    name: Price(on_demand, "on demand", _RUNPOD, spot)
    for name, spot, on_demand in (
        ("rtx-3090", 0.22, 0.39),
        ("rtx-4090", 0.34, 0.60),
        ("rtx-5090", 0.69, 1.22),
        ("rtx-pro-6000", 0.89, 1.57),
        ("l4", 0.44, 0.78),
        ("l40", 0.69, 1.22),
        ("l40s", 0.79, 1.40),
        ("a100-80-pcie", 1.19, 2.10),
        ("a100-80", 1.39, 2.45),
        ("h100-80-pcie", 1.99, 3.51),
        ("h100-80", 2.69, 4.76),
        ("h200", 3.59, 6.35),
        ("b200", 5.98, 10.57),
    )
}
"""{name of the machine: price}."""
