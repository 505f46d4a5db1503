"""Checks every sample of any dataset before its ids index rows of an embedding.

A corpus can be damaged, or built with another tokenizer. On CUDA an id without a row ends the process without a reason;
if the vocabulary is split over ranks, training would go on silently without a row for the id.
"""

import numpy as np
from numpy.typing import NDArray

from memo.data.sample import Sample, SampleDataset
from memo.errors import DataError


def where(dataset: object, index: int, offset: int) -> str:
    """The source of token `offset` of the window of sample `index`: file, document, and token in it, if the dataset
    has a method `where`; else only the sample."""
    locate = getattr(dataset, "where", None)
    return f"{type(dataset).__name__}.sample({index}), token {offset}" if locate is None else locate(index, offset)


def checked_sample(dataset: SampleDataset, index: int, vocab_size: int) -> Sample:
    """Return sample `index` after checking that a model of `vocab_size` tokens can read it.

    Raises DataError, which names the place of the first fault, for arrays that are no sample of dataset.seq_length
    tokens, an id outside [0, vocab_size), a loss mask outside [0, 1], a position outside [0, seq_length), and document
    boundaries that do not rise from 0 to seq_length.
    """
    sample = dataset.sample(index)
    _check_arrays(sample, dataset, index)
    for first, ids in ((0, sample.tokens), (1, sample.labels)):  # label i is the window's token i + 1
        fault = _first_outside(ids, 0, vocab_size - 1)
        if fault is not None:
            larger = "" if ids[fault] < 0 else f", or train a model with --vocab-size {ids[fault] + 1} or more"
            raise DataError(
                f"{where(dataset, index, first + fault)} (position {fault} of sample {index}): the id is {ids[fault]}, "
                f"but the model's vocabulary has {vocab_size} tokens, 0 to {vocab_size - 1}: build the corpus again "
                f"with the tokenizer of the model{larger}"
            )
    fault = _first_outside(sample.loss_mask, 0.0, 1.0)
    if fault is not None:
        raise DataError(
            f"{where(dataset, index, 1 + fault)} (position {fault} of sample {index}): its loss mask is "
            f"{sample.loss_mask[fault]}, but must be from 0 to 1: build the corpus again"
        )
    return sample


def _first_outside(values: NDArray[np.number], least: float, most: float) -> int | None:
    """The index of the first value outside [least, most], or None; NaN counts as outside."""
    if least <= values.min() and values.max() <= most:  # two passes without a copy: the usual case
        return None
    return int(np.flatnonzero(~((values >= least) & (values <= most)))[0])


def _check_arrays(sample: Sample, dataset: SampleDataset, index: int) -> None:
    name, length = f"{type(dataset).__name__}.sample({index})", dataset.seq_length
    kinds = {"tokens": np.integer, "labels": np.integer, "positions": np.integer, "loss_mask": np.floating}
    for field, kind in kinds.items():
        values = getattr(sample, field)
        if values.shape != (length,) or not np.issubdtype(values.dtype, kind):
            raise DataError(
                f"{name}.{field} has shape {values.shape} and dtype {values.dtype}, but must have shape ({length},) "
                f"and hold {kind.__name__} values: mend that dataset"
            )
    bounds = sample.cu_seqlens
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length or (np.diff(bounds) <= 0).any():
        raise DataError(
            f"{name}.cu_seqlens is {bounds.tolist()[:8]}, but must rise from 0 to {length}: mend that dataset"
        )
    fault = _first_outside(sample.positions, 0, length - 1)
    if fault is not None:
        raise DataError(
            f"{name}.positions[{fault}] is {sample.positions[fault]}, but must be from 0 to {length - 1}: mend that "
            "dataset"
        )
