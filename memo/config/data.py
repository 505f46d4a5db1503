"""The data that a run reads."""

from dataclasses import dataclass
from typing import Annotated, Literal

from memo.config.blend import read_blend
from memo.config.flag import TOKENS, Flag, PositiveInt, ReadWith
from memo.config.split import read_split

LongConversations = Literal["truncate", "drop"]
_CORPUS = ReadWith("data_path", use="--data-path PREFIX")
_EVALUATED = ReadWith("eval_interval", use="--eval-interval 100")


@dataclass(frozen=True)
class DataConfig:
    """A Megatron .bin/.idx corpus, or mock data."""

    seq_length: Annotated[PositiveInt, TOKENS, Flag(aliases=("seq_len",))] = 1024
    """Tokens in one training sample."""
    data_path: Annotated[tuple[str, ...] | None, Flag(metavar="PREFIX|WEIGHT PREFIX")] = None
    """Prefix of the .bin and .idx files of a corpus (`memo data demo OUT` makes one; `memo data chat` makes one of
    conversations). Several corpora have a weight before each: 0.7 data/a 0.3 data/b; without weights each counts by its
    size."""
    eval_data_path: Annotated[tuple[str, ...] | None, Flag(metavar="PREFIX|WEIGHT PREFIX|NAME=PREFIX"), _EVALUATED] = (
        None
    )
    """Corpora for evaluation, in the form of data-path; or several corpora by name, each evaluated separately:
    web=data/web-eval code=data/c."""
    split: Annotated[str | None, Flag(metavar="TRAIN,VALID,TEST"), _CORPUS] = None
    """Shares of the documents of data-path for training, for the evaluations of eval-interval, and for one evaluation
    at the end, such as 98,1,1. Each part is of neighbouring documents, in this order, as in Megatron-LM. Default: train
    on all."""
    tokenizer: str | None = None
    """`byte`, or a tokenizer.json; default: the one that the corpus was built with."""
    mock_data: bool = False
    """Train on generated tokens; conflicts with data-path."""
    packing: bool = True
    """Keep attention, positions and loss inside documents. Off: each sample is one long text, or one conversation."""
    long_conversations: LongConversations = "truncate"
    """How to treat conversations of more than seq-length + 1 tokens: truncate them, or drop them."""
    reference_log_probs: Annotated[str | None, ReadWith("preference", use="--preference dpo")] = None
    """File of the log-probs of the pairs under the reference; the run writes it before its first step if it is missing.
    Needed where more than LoRA's adapters is trained."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of the corpora of data-path. Raises ConfigError for words that are no blend."""
        return () if self.data_path is None else read_blend("--data-path", self.data_path).prefixes

    @property
    def holds_out(self) -> bool:
        """Whether split leaves a part of data-path for evaluations."""
        return self.split is not None and read_split(self.split).valid is not None

    @property
    def may_pack(self) -> bool:
        """Whether samples may hold several documents. Datasets that a program hands over may, as packing is all that is
        known of them."""
        return self.packing and not self.mock_data

    @property
    def packs_documents(self) -> bool:
        """Whether the samples of the corpus may hold several documents."""
        return self.packing and self.data_path is not None
