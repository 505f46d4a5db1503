"""Log-probs of pairs of answers under the initial model of preference training (--reference-log-probs)."""

from dataclasses import dataclass
from typing import Any

from memo.artifacts.artifact import Artifact


@dataclass(frozen=True)
class ReferenceLogProbs(Artifact):
    """log p of each answer in nats, summed over the tokens that count.

    Attributes:
        of: the corpus, the settings by which answers are cut, and the model that computed the log-probs.
        pairs: numbers of pairs in the corpus, from 0 on; pairs that are in no sample are left out.
        chosen, rejected: log p of the chosen and of the rejected answer of each of `pairs`.
    """

    schema = "reference_log_probs"
    remedy = "remove it, and the run writes another before its first step"

    of: dict[str, Any]
    pairs: list[int]
    chosen: list[float]
    rejected: list[float]

    def by_pair(self) -> dict[int, tuple[float, float]]:
        return dict(zip(self.pairs, zip(self.chosen, self.rejected, strict=True), strict=True))
