"""The check of every sample, whoever wrote its dataset, before its ids choose rows of an embedding.

A corpus can be damaged, or built with another tokenizer. On CUDA an id without a row ends the process without a reason;
where the vocabulary is split over ranks, it would be trained on silently, with no row at all.
"""

import numpy as np
from numpy.typing import NDArray

from memo.data.sample import Sample, SampleDataset
from memo.errors import DataError


def where(dataset: object, index: int, offset: int) -> str:
    """Where token `offset` of the window of sample `index` comes from: file, document, and token in it, if the dataset
    has a method `where` that says so."""
    locate = getattr(dataset, "where", None)
    return f"{type(dataset).__name__}.sample({index}), token {offset}" if locate is None else locate(index, offset)


def checked_sample(dataset: SampleDataset, index: int, vocab_size: int) -> Sample:
    """Sample `index`, fit for a model of `vocab_size` tokens.

    Raises DataError, naming where the first fault comes from, for arrays that are no sample of dataset.seq_length
    tokens, an id outside of [0, vocab_size), a loss mask outside of [0, 1], a position outside of [0, seq_length), and
    boundaries of documents that do not rise from 0 to seq_length.
    """
    sample = dataset.sample(index)
    _check_arrays(sample, dataset, index)
    for first, ids in ((0, sample.tokens), (1, sample.labels)):  # label i is the window's token i + 1
        fault = _first_outside(ids, 0, vocab_size - 1)
        if fault is not None:
            raise DataError(
                f"{where(dataset, index, first + fault)} (position {fault} of sample {index}): the id is {ids[fault]}, "
                f"but the model's vocabulary has {vocab_size} tokens, 0 to {vocab_size - 1}: "
                + _remedy(int(ids[fault]))
            )
    fault = _first_outside(sample.loss_mask, 0.0, 1.0)
    if fault is not None:
        raise DataError(
            f"{where(dataset, index, 1 + fault)} (position {fault} of sample {index}): its loss mask is "
            f"{sample.loss_mask[fault]}, but must be from 0 to 1: build the corpus again"
        )
    _check_documents(sample, dataset, index)
    return sample


def _remedy(found: int) -> str:
    again = "build the corpus again with the tokenizer of the model"
    return again if found < 0 else f"{again}, or train a model with --vocab-size {found + 1} or more"


def _first_outside(values: NDArray[np.number], least: float, most: float) -> int | None:
    """Where the first value outside of [least, most] stands; not-a-number is outside."""
    if least <= values.min() and values.max() <= most:  # two passes without a copy: nearly always all there is to do
        return None
    return int(np.flatnonzero(~((values >= least) & (values <= most)))[0])


def _check_arrays(sample: Sample, dataset: SampleDataset, index: int) -> None:
    kinds = {"tokens": np.integer, "labels": np.integer, "positions": np.integer, "loss_mask": np.floating}
    for name, kind in kinds.items():
        values = getattr(sample, name)
        if values.shape != (dataset.seq_length,) or not np.issubdtype(values.dtype, kind):
            raise DataError(
                f"{type(dataset).__name__}.sample({index}).{name} has shape {values.shape} and dtype {values.dtype}, "
                f"but must have shape ({dataset.seq_length},) and hold {kind.__name__} values: mend that dataset"
            )


def _check_documents(sample: Sample, dataset: SampleDataset, index: int) -> None:
    bounds, name = sample.cu_seqlens, f"{type(dataset).__name__}.sample({index})"
    rises = len(bounds) > 1 and bounds[0] == 0 and bounds[-1] == dataset.seq_length and (np.diff(bounds) > 0).all()
    if not rises:
        raise DataError(
            f"{name}.cu_seqlens is {bounds.tolist()[:8]}, but must rise from 0 to {dataset.seq_length}: "
            "mend that dataset"
        )
    fault = _first_outside(sample.positions, 0, dataset.seq_length - 1)
    if fault is not None:
        raise DataError(
            f"{name}.positions[{fault}] is {sample.positions[fault]}, but must be from 0 to "
            f"{dataset.seq_length - 1}: mend that dataset"
        )
