"""PREFIX.json: what a corpus is made of, written beside its .bin and .idx files."""

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Self

from memo.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from memo.errors import DataError

SCHEMA_VERSION = 1
TOKENIZER_SUFFIX = "-tokenizer.json"


@dataclass(frozen=True)
class CorpusFacts:
    """Tokenizer and size of one corpus."""

    tokenizer: str
    """`byte`, or the name of a tokenizer file in the corpus's own folder, so that the folder can be moved."""
    vocab_size: int
    eod: int
    num_documents: int
    num_tokens: int
    num_answer_tokens: int | None = None
    """Of conversations, whose answers alone are learned (`memo data chat`): tokens of answers. None: of texts."""

    def to_json(self) -> str:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"schema_version": SCHEMA_VERSION, **known}, indent=2) + "\n"

    @classmethod
    def load(cls, prefix: str | Path) -> Self:
        """Read PREFIX.json. Raises DataError when it is missing or not what `to_json` writes."""
        path = Path(f"{prefix}.json")
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist; name the tokenizer of this corpus yourself") from error
        except ValueError as error:
            raise DataError(f"{path} is no JSON: {error}; build the corpus again") from error
        required = {"schema_version"} | {field.name for field in fields(cls) if field.default is MISSING}
        optional = {field.name for field in fields(cls)} - required
        fits = isinstance(content, dict) and required <= set(content) <= required | optional
        if not fits or content["schema_version"] != SCHEMA_VERSION:
            raise DataError(
                f"{path} must have the fields {sorted(required)} with schema_version {SCHEMA_VERSION}, "
                f"but holds {content}; build the corpus again"
            )
        del content["schema_version"]
        return cls(**content)


def mask_prefix(prefix: str | Path) -> Path:
    """Of the pair of files that says which tokens of a corpus of conversations are answers."""
    return Path(f"{prefix}.mask")


def tokenizer_spec(prefix: str | Path, tokenizer: Tokenizer) -> str:
    """How PREFIX.json names `tokenizer`."""
    return Path(f"{prefix}{TOKENIZER_SUFFIX}").name if isinstance(tokenizer, BPETokenizer) else tokenizer.name


def load_corpus_tokenizer(prefix: str | Path) -> Tokenizer:
    """The tokenizer that the corpus was built with. Raises DataError when its file is now another one."""
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
