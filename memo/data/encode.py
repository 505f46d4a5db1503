"""Pieces of files to tokens: what a build does to each of them, in this process or in another."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memo.data.left_out import hinted
from memo.data.records import RecordPiece
from memo.data.tokenizer import Tokenizer
from memo.errors import DataError


@dataclass(frozen=True, eq=False)
class Encoded:
    """The documents of one piece.

    Attributes:
        ids: [sum of lengths], end to end, in the dtype of the corpus.
        lengths: [number of documents], in tokens; 0 for one without text.
        refused: messages about records that cannot be read, in order.
        num_text_bytes: in UTF-8, of the documents.
        done_bytes: as of the piece.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    refused: tuple[str, ...]
    num_text_bytes: int
    done_bytes: int


@dataclass(frozen=True)
class Encoder:
    """How the pieces of one build become tokens.

    Attributes:
        key: of a record that holds the text.
        dtype: of the corpus.
        skip: go on after a record that cannot be read.
    """

    tokenizer: Tokenizer
    key: str
    dtype: np.dtype[Any]
    skip: bool

    def __call__(self, piece: RecordPiece) -> Encoded:
        """Raises DataError for the first record that cannot be read, unless `skip`."""
        refused: list[str] = []

        def refuse(error: DataError) -> None:
            if not self.skip:
                raise hinted(error) from None
            refused.append(str(error))

        texts = list(piece.texts(self.key, refuse))
        found = self.tokenizer.encode_batch(texts)
        ids = np.concatenate(found).astype(self.dtype) if found else np.empty(0, dtype=self.dtype)
        lengths = np.array([len(each) for each in found], dtype=np.int64)
        num_text_bytes = sum(len(text.encode()) for text in texts)
        return Encoded(ids, lengths, tuple(refused), num_text_bytes, piece.done_bytes)
