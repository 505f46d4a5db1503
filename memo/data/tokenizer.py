"""Tokenizers: from text to token ids and back."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source, read_bytes
from memo.artifacts.regular_file import replace_file
from memo.config.hugging_face import hub_name
from memo.config.presets import PRESETS
from memo.errors import ConfigError, DataError

END_OF_DOCUMENT_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<seed:eos>", "[e~["),
)
"""Names of the end-of-document token (GPT-2 and Qwen, Llama 3, Llama 2, Gemma; DeepSeek, Seed-OSS, MiniMax), tried in
this order."""
_NUM_BYTES = 256
_LARGEST_DEFINITION_BYTES = 1 << 28
"""Limit of a tokenizer.json; the largest in use have an eighth of it."""
_MOST_TRAINED = 1 << 22
"""Limit of a vocabulary that is trained; the largest in use have a sixteenth of it."""


class Tokenizer(Protocol):
    """The part of a tokenizer that memo uses."""

    @property
    def name(self) -> str:
        """A name for people."""

    @property
    def vocab_size(self) -> int:
        """A number above every id."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token, which `encode` never produces."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`, shape [n]. Raises UnicodeEncodeError for half of a surrogate pair."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """`encode` each text, on all cores if the tokenizer can."""

    def decode(self, ids: ArrayLike) -> str:
        """Text of `ids`, shape [n], without special tokens. Raises DataError for an unknown id."""

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The spellings of the special tokens."""

    def encode_located(self, texts: Sequence[str]) -> "list[Located]":
        """Encode texts of a chat template: unlike in `encode`, the spelling of a special token becomes this token."""


@dataclass(frozen=True, eq=False)
class Located:
    """The tokens of a text and their characters."""

    ids: NDArray[np.int32]
    """[n]"""
    offsets: NDArray[np.int64]
    """[n, 2], the characters [begin, end) of each token. Several tokens of one character (bytes of an emoji) have the
    same offsets; some tokenizers leave out the blanks around a word."""


class ByteTokenizer:
    """The UTF-8 bytes of the text as ids 0 to 255, and 256 to end a document: no training, no files."""

    name = "byte"
    vocab_size = _NUM_BYTES + 1
    eod = _NUM_BYTES
    special_texts: tuple[str, ...] = ()

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        values = _checked_ids(ids, self.vocab_size)
        # A sample may begin in the middle of a character, so broken bytes are shown rather than refused.
        return values[values < _NUM_BYTES].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    @property
    def definition(self) -> bytes:
        """This tokenizer as a tokenizer.json: byte-level BPE without merges, where the id of a byte's letter is the
        byte."""
        eod = {"id": self.eod, "content": END_OF_DOCUMENT_NAMES[0], "special": True, "normalized": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        content = {
            "version": "1.0",
            "added_tokens": [eod | {"single_word": False, "lstrip": False, "rstrip": False}],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
                "merges": [],
            },
        }
        return json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"

    def encode_located(self, texts: Sequence[str]) -> list[Located]:
        return [self._located(text) for text in texts]

    def _located(self, text: str) -> Located:
        ids = self.encode(text)
        begins = np.cumsum((ids & 0xC0) != 0x80) - 1  # every byte except continuation bytes begins a character
        return Located(ids, np.stack([begins, begins + 1], axis=1))


def _byte_letters() -> Iterator[str]:
    """Yield the letter of byte-level BPE for each byte: its Latin-1 letter if it is printable, else the next unused."""
    unused = count(_NUM_BYTES)
    for byte in range(_NUM_BYTES):
        letter = chr(byte)
        yield letter if letter.isprintable() and not letter.isspace() else chr(next(unused))


class BPETokenizer:
    """A Hugging Face `tokenizers` file."""

    def __init__(self, path: str | Path) -> None:
        """`path`: a tokenizer.json.

        Raises DataError if it is unreadable or has no end-of-document token.
        """
        import tokenizers  # imported here, because the byte tokenizer starts faster without it

        source = Source(str(path), DataError, "give a tokenizer.json of Hugging Face")
        self.definition = read_bytes(path, source, max_bytes=_LARGEST_DEFINITION_BYTES)
        """The file's content, to be copied next to the data."""
        self._path = path
        with _told(f"{path} cannot be read as a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(self.definition.decode("utf-8"))
        # Files often have settings for truncation and padding in inference, which would cut or pad documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        found = [name for name in END_OF_DOCUMENT_NAMES if name in ids]
        if not found:
            raise DataError(
                f"{path} has none of the tokens {', '.join(END_OF_DOCUMENT_NAMES)}; add one to end documents"
            )
        self.eod_name = found[0]
        self.eod: int = ids[self.eod_name]
        self.vocab_size: int = max(ids.values()) + 1  # ids may have holes, so this is not their number
        self.name = f"bpe-{self.vocab_size}"
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_texts: tuple[str, ...] = tuple(token.content for token in added if token.special)

    def encode(self, text: str) -> NDArray[np.int32]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        for text in texts:
            text.encode("utf-8")  # the library would raise a TypeError for half a surrogate pair
        # A document that spells "<|endoftext|>" is text about tokenizers, not the end of a document.
        return [np.array(each.ids, dtype=np.int32) for each in self._encodings(texts, spelled_out=False)]

    def encode_located(self, texts: Sequence[str]) -> list[Located]:
        return [
            Located(np.array(each.ids, dtype=np.int32), np.array(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in self._encodings(texts, spelled_out=True)
        ]

    def _encodings(self, texts: Sequence[str], spelled_out: bool) -> list[Any]:
        """`spelled_out`: whether the spelling of a special token becomes this token."""
        self._tokenizer.encode_special_tokens = not spelled_out
        with _told(f"{self._path} cannot encode a text"):
            found: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return found

    def decode(self, ids: ArrayLike) -> str:
        values = _checked_ids(ids, self.vocab_size).tolist()
        with _told(f"{self._path} cannot decode tokens"):
            text: str = self._tokenizer.decode(values, skip_special_tokens=True)
        return text


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn errors of the library, and panics of its Rust code, which are no Exceptions, into DataError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{what}: {words}: give a tokenizer.json of Hugging Face that is whole") from None


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> BPETokenizer:
    """Train a byte-level BPE (like GPT-2's, so that any text survives a round trip) and save it to `path`.

    The vocabulary has at most `vocab_size` tokens; few texts may have too few pairs to fill it. Raises ConfigError if
    there is no room for the 256 bytes and the end-of-document token, or for more tokens than any model has.
    """
    if vocab_size < _NUM_BYTES + 1:
        raise ConfigError(f"vocab-size = {vocab_size}, but byte-level BPE needs at least {_NUM_BYTES + 1}; raise it")
    if vocab_size > _MOST_TRAINED:  # the library reserves memory for all, and ends the process where there is none
        raise ConfigError(f"vocab-size = {vocab_size}, but at most {_MOST_TRAINED} tokens are trained; lower it")
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    replace_file(path, tokenizer.to_str(pretty=True))
    return BPETokenizer(path)


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load `byte`, a tokenizer.json, or a directory with one.

    Raises ConfigError if there is no such file, CheckpointError if it is a link that leads out of the directory.
    """
    if str(spec) == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = model_file(path, "tokenizer.json") or path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"tokenizer = {spec}: {path} does not exist; {_remedy(str(spec))}")
    return BPETokenizer(path)


def _remedy(spec: str) -> str:
    if spec in PRESETS:
        return f"{spec} is a preset, a shape without a tokenizer: give the directory of the model, or `byte`"
    if hub_name(spec):
        return (
            f"memo reads local files: `hf download {spec} tokenizer.json tokenizer_config.json --local-dir {spec}` "
            "fetches it; or give `byte`, a tokenizer.json or its directory"
        )
    return "give `byte`, a tokenizer.json or its directory"


def _checked_ids(ids: ArrayLike, vocab_size: int) -> NDArray[np.int64]:
    values = np.asarray(ids, dtype=np.int64)
    if values.size and not 0 <= values.min() <= values.max() < vocab_size:
        raise DataError(
            f"ids from {values.min()} to {values.max()} do not fit a vocabulary of {vocab_size}; "
            "use the tokenizer that the text was encoded with"
        )
    return values
