"""Measured times of attention kernels on one device by shape of the call, for --attention-backend auto.

As a file (schema "attention_table"):

    {"schema": "attention_table", "version": 1, "device": "NVIDIA H200", "torch": "2.13.0", "memo": "0.1.0",
     "rows": [{"case": {"head_dim": 128, "dtype": "bf16", "causal": true, "packed": false, "tokens": 32768},
               "heads": 4, "kv_heads": 4, "batch": 1, "measured_at": "2026-01-31T12:00:00+01:00",
               "seconds": {"cudnn": 0.0081, "flash": 0.0122}, "unusable": {"te": "it is not installed"}}]}
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from memo.artifacts.artifact import Artifact
from memo.artifacts.fields import PositiveFloat, PositiveInt, Time

LONGEST_TOKENS = 32768
"""Longer sequences are not measured: kernels work on tiles of a few hundred tokens, so their ratio should not change.
"""


@dataclass(frozen=True)
class AttentionCase:
    """A kind of call of an attention kernel.

    Attributes:
        packed: whether a row has several documents, each causal in itself.
        tokens: the class of the length, see `length_class`.
        deterministic: whether gradients must have the same bits each time.
    """

    head_dim: PositiveInt
    dtype: str
    causal: bool
    packed: bool
    tokens: PositiveInt
    deterministic: bool = False

    def __str__(self) -> str:
        shape = "packed" if self.packed else "causal" if self.causal else "full"
        text = f"{shape}, {self.tokens:,} tokens, heads of {self.head_dim}, {self.dtype}"
        return text + (", deterministic" if self.deterministic else "")


def length_class(tokens: int) -> int:
    """The largest power of two that is not above `tokens`, nor above LONGEST_TOKENS."""
    return 1 << (min(tokens, LONGEST_TOKENS).bit_length() - 1)


@dataclass(frozen=True)
class AttentionRow:
    """One case, measured with `heads` query heads, `kv_heads` key/value heads and `batch` sequences.

    Attributes:
        seconds: time of one forward and one backward, by backend.
        unusable: {backend that could not be measured: reason}.
    """

    case: AttentionCase
    heads: PositiveInt
    kv_heads: PositiveInt
    batch: PositiveInt
    measured_at: Time
    seconds: dict[str, PositiveFloat]
    unusable: dict[str, str]


@dataclass(frozen=True)
class AttentionTable(Artifact):
    """All rows for one device and one version of torch and memo; at most one row for each case."""

    schema = "attention_table"
    remedy = "delete it, and run `memo profile --attention` again"

    device: str
    torch: str
    memo: str
    rows: tuple[AttentionRow, ...] = ()

    def row(self, case: AttentionCase) -> AttentionRow | None:
        return next((row for row in self.rows if row.case == case), None)

    def updated(self, rows: tuple[AttentionRow, ...]) -> "AttentionTable":
        """Return the table with new rows, which replace old rows of the same cases."""
        new = {row.case for row in rows}
        return dataclasses.replace(self, rows=(*(row for row in self.rows if row.case not in new), *rows))

    def totals(self, calls: Mapping[AttentionCase, float]) -> dict[str, float]:
        """{backend: seconds of all `calls`}, the fastest backend first; `calls` tells how often each case runs.

        It has only backends that were measured in every case; it is empty if a case is not in the table.
        """
        found = [(self.row(case), times) for case, times in calls.items()]
        if not found or any(row is None for row, _ in found):
            return {}
        measured = [(row.seconds, times) for row, times in found if row is not None]
        names = set[str].intersection(*(set(seconds) for seconds, _ in measured))
        totals = {name: sum(seconds[name] * times for seconds, times in measured) for name in names}
        return dict(sorted(totals.items(), key=lambda pair: (pair[1], pair[0])))
