"""Log-probs of pairs of answers under the model that preference training began with (--reference-log-probs)."""

from dataclasses import dataclass
from typing import Any

from memo.artifacts.artifact import Artifact


@dataclass(frozen=True)
class ReferenceLogProbs(Artifact):
    """The sum over the tokens that count of each answer, in nats.

    Attributes:
        of: which corpus it is of, how its answers are cut, and which model told them.
        pairs: numbers of pairs in the corpus, from 0 on; those that no sample holds are left out.
        chosen, rejected: log p of both answers of each of them.
    """

    schema = "reference_log_probs"
    remedy = "remove it, and the run writes another before its first step"

    of: dict[str, Any]
    pairs: list[int]
    chosen: list[float]
    rejected: list[float]

    def by_pair(self) -> dict[int, tuple[float, float]]:
        return dict(zip(self.pairs, zip(self.chosen, self.rejected, strict=True), strict=True))
