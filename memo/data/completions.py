"""Samples of documents of which some tokens count: conversations, and completions that a caller has scored."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memo.data.sample import Sample, cut_sample
from memo.errors import DataError

Document = tuple[NDArray[np.integer], NDArray[np.integer]]
"""Token ids [n], and for each 1 if it counts as a label, else 0."""


def sample_of(documents: Iterable[Document], seq_length: int, fill: int) -> Sample:
    """One sample of documents of at most seq_length + 1 tokens together; the token `fill` takes what stays free, as a
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
    """Samples of `seq_length` tokens that hold all documents in their order, each whole: prompts with completions, for
    example, whose token ids stand beside a list of 1 for a token of the completion and 0 for one of the prompt.

    Raises DataError for one that is too long, has no label that counts, or not one mark a token.
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
