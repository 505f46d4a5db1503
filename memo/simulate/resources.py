"""The resources of one stage that work at the same time (rows of a trace): streams, the link of dp, CPU and disk."""

from collections.abc import Callable
from dataclasses import dataclass, field

ROWS = ("compute", "offload", "prefetch", "data", "cpu", "disk")
"""data: reduction of gradients and gathering of weights over dp x cp. cpu: updates of states in host memory. disk:
copies of activations that host memory does not hold."""

Record = Callable[[str, str, float, float], None]
"""Called as (row, name, start, end) for every piece of work."""


@dataclass
class Resources:
    """The time at which each row of a stage is free, and how long it was busy.

    `overlap`: copies, and updates on the CPU, run beside compute.
    """

    overlap: bool
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROWS, 0.0))
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROWS, 0.0))

    def take(self, row: str, ready_s: float, duration_s: float) -> tuple[float, float]:
        """Occupy a row with work that is ready at `ready_s`; return (start, end)."""
        free, takes_turns = self.free, not self.overlap and row in ("offload", "prefetch", "cpu")
        start_s = max(free[row], free["compute"]) if takes_turns else free[row]
        if ready_s > start_s:
            start_s = ready_s
        end_s = start_s + duration_s
        if duration_s:
            free[row] = end_s
            self.busy_s[row] += duration_s
            if takes_turns:
                free["compute"] = end_s
        return start_s, end_s
