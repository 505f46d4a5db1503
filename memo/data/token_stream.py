"""Samples from any source of token ids or texts: a torch Dataset or IterableDataset, a list, a generator.

Each item is a document: token ids in one dim, a text if the run has a tokenizer, or a mapping as Hugging Face's
tokenizers write it (`input_ids`; `attention_mask` is 0 for padding, `labels` are -100 for tokens that are not learned).
Items of two dims are batches of documents, and an iterable of single ids is one document. As in a corpus
(memo.data.packing), the documents of an epoch are concatenated and cut into windows of s + 1 tokens that overlap by
one; the rest at the end is dropped.

A source with items by number is read in an order that (seed, epoch) decides; a source that can only be iterated is read
in its own order. Finding a sample means reading all samples before it. So a resumed run reads its data again, and needs
a source that yields the same items every time and on every rank; a checksum of the first sample is compared.
"""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memo.artifacts.checksum import checksum
from memo.config.identity import Fact
from memo.data.hashing import permutation
from memo.data.records import utf8
from memo.data.sample import Sample, cut_sample
from memo.data.tokenizer import Tokenizer
from memo.errors import ConfigError, DataError

_NOT_LEARNED = -100
"""The label that torch's losses ignore."""
_STREAM = 2
_MOST_IDS = 4096
"""Single ids that are gathered before they become a part of a document."""
_KEPT_SAMPLES = 64
"""The most recent samples are kept, because the planning of memory reads its samples twice."""

_Document = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]
"""Ids, the mask of learned ids, and whether a document ends with an id: [n] each."""


class TokenStream:
    """Endless samples; sample i is the i-th window of the stream.

    Without `packing` a sample is one text from 0 to s. Memory: a window, and the most recent samples.
    """

    def __init__(
        self,
        source: Any,
        seq_length: int,
        seed: int,
        packing: bool = True,
        name: str = "train_data",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Read the first sample. Raises DataError for items that are neither token ids nor (with a tokenizer) texts,
        and ConfigError for too few tokens."""
        self.seq_length, self.seed, self.packing = seq_length, seed, packing
        self._source, self._name, self._kind = source, name, type(source).__name__
        self._tokenizer = tokenizer
        self._has_numbers = has_numbers(source)
        self._is_read_once = not self._has_numbers and iter(source) is source
        self._kept: dict[int, Sample] = {}
        self._restart()
        first, digest = self.sample(0), checksum()
        digest.update(first.tokens.astype("<i8").tobytes())
        digest.update(first.loss_mask.astype("<f4").tobytes())
        self._begin = f"a stream that begins with {digest.hexdigest()}"

    def sample(self, index: int) -> Sample:
        """Sample `index`. Raises DataError for bad items and for an iterator that has ended."""
        if index in self._kept:
            return self._kept[index]
        if index < self._next:
            if self._is_read_once:
                raise DataError(
                    f"{self._name} is a {self._kind}, which can be read but once, and sample {index} was read before: "
                    "give something that can be iterated again, such as a list or a Dataset"
                )
            self._restart()
        while True:
            window, ends, learned = next(self._windows)
            self._next += 1
            if self._next > index:
                break
        sample = cut_sample(window, ends if self.packing else ends[:0])
        sample.loss_mask[:] *= learned[1:]
        while len(self._kept) >= _KEPT_SAMPLES:
            del self._kept[next(iter(self._kept))]
        self._kept[index] = sample
        return sample

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch, counted by reading the epoch. Raises AttributeError for a source without a length."""
        if not self._has_numbers:
            raise AttributeError(f"{self._kind} has no length")
        num_tokens = sum(len(ids) for ids, _, _ in self._documents(0))
        return (num_tokens - 1) // self.seq_length

    def where(self, index: int, offset: int) -> str:
        return f"{self._name} ({self._kind}), token {index * self.seq_length + offset} of those it hands out"

    def identity(self) -> dict[str, Fact]:
        """The stream is known by its first sample."""
        return {"data_path": self._begin, "packing": self.packing}

    def describe(self) -> str:
        order = "shuffled each epoch" if self._has_numbers else "in the order of its own"
        return f"documents from a {self._kind}, {order}"

    def _restart(self) -> None:
        self._windows, self._next = self._cut(), 0

    def _cut(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]]:
        """Yield (window [s + 1], the ends of documents in it, the mask of learned tokens), epoch after epoch."""
        size = self.seq_length
        for epoch in count():
            parts: list[_Document] = []
            num_tokens = num_windows = 0
            for document in self._documents(epoch):
                parts.append(document)
                num_tokens += len(document[0])
                if num_tokens <= size:
                    continue
                ids, learned, ends = map(np.concatenate, zip(*parts, strict=True))
                cut = (num_tokens - 1) // size * size
                for first in range(0, cut, size):
                    stop = first + size
                    yield ids[first : stop + 1], 1 + np.flatnonzero(ends[first:stop]), learned[first : stop + 1]
                    num_windows += 1
                parts = [(ids[cut:], learned[cut:], ends[cut:])]
                num_tokens -= cut
            if not num_windows:
                raise ConfigError(
                    f"{self._name} is a {self._kind} of {num_tokens} tokens, but --seq-length {size} needs at least "
                    f"{size + 1}: give more of them or a shorter length"
                )
            if self._is_read_once:
                raise DataError(
                    f"{self._name} is a {self._kind} that has ended after {num_windows} samples of {size} tokens: give "
                    "fewer --train-iters, or something that can be iterated again, such as a list or a Dataset"
                )

    def _documents(self, epoch: int) -> Iterator[_Document]:
        """Yield the documents of one epoch that are not empty."""
        single: list[int] = []
        for number, item in enumerate(self._items(epoch)):
            if isinstance(item, int | np.integer) and not isinstance(item, bool):
                single.append(int(item))
                if len(single) == _MOST_IDS:
                    yield _document(np.array(single), ends=False)
                    single = []
                continue
            where = f"{self._name} ({self._kind}), item {number}"
            yield from _documents_of(self._ids_of(item, where) if isinstance(item, str) else item, where)
        if single:
            yield _document(np.array(single))

    def _ids_of(self, text: str, where: str) -> NDArray[np.integer]:
        """The tokens of a text and the end-of-document token, as in a corpus."""
        if self._tokenizer is None:
            raise DataError(
                f"{where} is a text, and the run has no tokenizer: give one, such as tokenizer='byte', or token ids"
            )
        utf8(text, where)
        ids = self._tokenizer.encode(text)
        return np.append(ids, self._tokenizer.eod) if len(ids) else ids

    def _items(self, epoch: int) -> Iterator[Any]:
        if not self._has_numbers:
            return iter(self._source)
        order = permutation((self.seed, epoch, _STREAM), len(self._source))
        return (self._source[int(number)] for number in order)


def has_numbers(source: Any) -> bool:
    """Whether a source has items by number; torch's IterableDataset inherits a `__getitem__` that raises."""
    is_iterable_dataset = any(kind.__name__ == "IterableDataset" for kind in type(source).__mro__)
    return hasattr(source, "__getitem__") and hasattr(source, "__len__") and not is_iterable_dataset


def is_stream(source: Any) -> bool:
    """Whether an object may be the source of a TokenStream."""
    return not isinstance(source, str | bytes | Mapping) and (has_numbers(source) or hasattr(source, "__iter__"))


def _document(ids: NDArray[np.integer], learned: NDArray[np.bool_] | None = None, ends: bool = True) -> _Document:
    last = np.zeros(len(ids), dtype=np.bool_)
    last[-1:] = ends
    mask = np.ones(len(ids)) if learned is None else learned
    return ids.astype(np.int64), mask.astype(np.float32), last


def _documents_of(item: Any, where: str) -> Iterator[_Document]:
    """Yield the documents of an item that are not empty."""
    fields = item if isinstance(item, Mapping) else {"input_ids": item}
    if "input_ids" not in fields:
        names = ", ".join(map(str, fields))
        raise DataError(f"{where} has the fields {names}, but not input_ids: hand out token ids, or the texts alone")
    named = ["input_ids", *(name for name in ("attention_mask", "labels") if fields.get(name) is not None)]
    rows = {name: _rows(fields[name], f"{where}: {name}") for name in named}
    ids = rows["input_ids"]
    for name, found in rows.items():
        if found.shape != ids.shape:
            raise DataError(f"{where}: {name} has the shape {found.shape}, but input_ids {ids.shape}: make them equal")
    kept, labels = rows.get("attention_mask", np.ones_like(ids)) != 0, rows.get("labels", ids)
    if not ((labels == ids) | (labels == _NOT_LEARNED) | ~kept).all():
        raise DataError(
            f"{where}: labels differ from input_ids: give the ids themselves, unshifted, or {_NOT_LEARNED} for what is "
            "not learned"
        )
    for own, is_kept, label in zip(ids, kept, labels, strict=True):
        if is_kept.any():
            yield _document(own[is_kept], label[is_kept] != _NOT_LEARNED)


def _rows(value: Any, where: str) -> NDArray[np.integer]:
    """[documents, tokens]."""
    try:
        found = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of several lengths, or a tensor on a GPU
        raise DataError(f"{where} cannot be read as an array ({error}): hand out token ids on the CPU") from None
    if not found.size and found.ndim in (1, 2):
        return np.empty((1, 0), dtype=np.int64)
    if found.ndim not in (1, 2) or not np.issubdtype(found.dtype, np.integer):
        raise DataError(
            f"{where} has the shape {found.shape} and dtype {found.dtype}: hand out whole numbers, token ids of one "
            "document or a batch of them; texts become ids with `memo data build`"
        )
    return found.reshape(-1, found.shape[-1])
