"""PREFIX.json: the facts of a corpus, written next to its .bin and .idx files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from memo.artifacts.fields import Count, FileName, PositiveInt, build
from memo.artifacts.reading import Source, read_json_object, shown
from memo.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from memo.errors import DataError

SCHEMA_VERSION = 1
TOKENIZER_SUFFIX = "-tokenizer.json"


@dataclass(frozen=True)
class CorpusFacts:
    """Tokenizer and size of one corpus."""

    tokenizer: FileName
    """`byte`, or the name of a tokenizer file in the corpus's own folder, so that the folder can be moved."""
    vocab_size: PositiveInt
    eod: Count
    num_documents: Count
    num_tokens: Count
    num_answer_tokens: Count | None = None
    """Learned tokens of conversations (`memo data chat`) or pairs; None for texts, which are learned whole."""
    num_pairs: Count | None = None
    """Preference pairs (`memo data pairs`): documents are chosen and rejected answers in turn. None for other data."""

    def to_json(self) -> str:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"schema_version": SCHEMA_VERSION, **known}, indent=2) + "\n"

    @classmethod
    def load(cls, prefix: str | Path) -> Self:
        """Read PREFIX.json. Raises DataError when it is missing or not what `to_json` writes."""
        path = Path(f"{prefix}.json")
        remedy = "build the corpus again, or name its tokenizer yourself"
        source = Source(str(path), DataError, remedy)
        content = read_json_object(path, source)
        version = content.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise source.refusal(f"schema_version is {shown(version)}, but this memo reads {SCHEMA_VERSION}")
        return build(cls, content, source)


def mask_prefix(prefix: str | Path) -> Path:
    """The prefix of the two files with the mask of learned tokens of a corpus."""
    return Path(f"{prefix}.mask")


def load_corpus_tokenizer(prefix: str | Path) -> Tokenizer:
    """The tokenizer with which the corpus was built. Raises DataError if its file has changed."""
    facts = CorpusFacts.load(prefix)
    if facts.tokenizer == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(prefix).parent / facts.tokenizer
    tokenizer = load_tokenizer(path)
    if (tokenizer.vocab_size, tokenizer.eod) != (facts.vocab_size, facts.eod):
        raise DataError(
            f"{path} has vocab_size {tokenizer.vocab_size} and eod {tokenizer.eod}, but {prefix}.json says "
            f"{facts.vocab_size} and {facts.eod}; restore the tokenizer or build the corpus again"
        )
    return tokenizer
