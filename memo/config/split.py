"""--split 98,1,1: which documents of a corpus are trained on, evaluated on and kept for a test.

As in Megatron-LM the numbers are shares of any sum, in this order, and each part is a run of neighbouring documents, in
the order of the corpus. Of n documents a part has those from number round(n x the sum of the shares before it) up to
round(n x the same sum with its own share).
"""

import math
import re
from dataclasses import dataclass
from itertools import accumulate, pairwise

from memo.artifacts.reading import shown
from memo.config.require import require

Part = tuple[float, float]
"""Where a part of the documents begins and ends, as shares of all."""
WHOLE: Part = (0.0, 1.0)


@dataclass(frozen=True)
class DocumentSplit:
    """The parts of a corpus; None for a part without documents."""

    train: Part
    valid: Part | None
    test: Part | None


def read_split(text: str) -> DocumentSplit:
    """The parts that --split names. Raises ConfigError unless it is a list of one to three shares, the first above
    0."""
    shares = text.split(",")
    is_list = all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", share) for share in shares)
    require(
        is_list and len(shares) <= 3,
        f"--split is {text}: give the shares of documents to train on, to evaluate on and for a test, such as 98,1,1",
    )
    numbers = [float(share) for share in shares] + [0.0] * (3 - len(shares))
    require(
        math.isfinite(sum(numbers)), f"--split is {shown(text)}, whose sum is too large: give shares such as 98,1,1"
    )
    require(numbers[0] > 0, f"--split is {text}, which leaves nothing to train on: give a first number above 0")
    bounds = list(accumulate((number / sum(numbers) for number in numbers), initial=0.0))
    parts = [(begin, end) if end > begin else None for begin, end in pairwise(bounds)]
    assert parts[0] is not None
    return DocumentSplit(parts[0], parts[1], parts[2])


def documents_of(part: Part, num_documents: int) -> range:
    """The indices of the documents of a part, where there are `num_documents`."""
    return range(round(part[0] * num_documents), round(part[1] * num_documents))
