"""Makes samples of documents in which only some tokens are learned: conversations, and completions to be scored."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memo.data.sample import Sample, cut_sample
from memo.errors import DataError

Document = tuple[NDArray[np.integer], NDArray[np.integer]]
"""Token ids [n], and a mask [n]: 1 for a token that counts as a label, else 0."""


def sample_of(documents: Iterable[Document], seq_length: int, fill: int) -> Sample:
    """One sample of documents that have at most seq_length + 1 tokens together. The token `fill` fills the rest, as a
    document of its own."""
    window = np.full(seq_length + 1, fill, dtype=np.int64)
    counts = np.zeros(seq_length + 1, dtype=np.float32)
    ends, end = [], 0
    for ids, mask in documents:
        begin, end = end, end + len(ids)
        window[begin:end], counts[begin:end] = ids, mask
        ends.append(end)
    inner = np.array([each for each in ends if each <= seq_length], dtype=np.int64)
    sample = cut_sample(window, inner)
    return replace(sample, loss_mask=sample.loss_mask * counts[1:])


def pack_completions(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]], seq_length: int, fill: int = 0
) -> list[Sample]:
    """Pack documents whole and in their order into samples of `seq_length` tokens. A document is a list of token ids
    and a list of marks: for a prompt with a completion, 0 for tokens of the prompt and 1 for tokens of the completion.

    Raises DataError for a document that is too long, has no label that counts, or has not one mark for each token.
    """
    groups: list[list[Document]] = []
    free = 0
    for number, (ids, mask) in enumerate(documents):
        if len(ids) != len(mask) or len(ids) > seq_length + 1 or not any(mask[1:]):
            raise DataError(
                f"documents[{number}] has {len(ids)} tokens and {len(mask)} marks, of which {sum(map(bool, mask[1:]))} "
                f"behind the first count: give as many marks as tokens, at least one 1 behind the first, and at most "
                f"seq_length + 1 = {seq_length + 1} tokens"
            )
        if len(ids) > free:
            groups.append([])
            free = seq_length + 1
        groups[-1].append((np.asarray(ids), np.asarray(mask)))
        free -= len(ids)
    return [sample_of(group, seq_length, fill) for group in groups]
