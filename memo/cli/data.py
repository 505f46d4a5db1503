"""`memo data demo`, `build`, `chat` and `pairs`: build corpora for `memo train --data-path`."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from memo.artifacts.fields import in_range
from memo.cli.main import Command, dispatch
from memo.config.command_line import parse_options
from memo.config.flag import Flag
from memo.config.require import require
from memo.data import BuildSummary, CorpusFacts, Reading, build_chat, build_corpus, build_demo, build_pairs
from memo.data.conversations import ChatForm
from memo.units import format_bytes, format_count

COMMANDS = (
    Command("demo", "build a corpus of texts that every machine has: Python's library", "memo.cli.data", "demo"),
    Command("build", "build a corpus of texts, or of JSON, Parquet or CSV records", "memo.cli.data", "build"),
    Command("chat", "build a corpus of conversations, in which only answers are learned", "memo.cli.data", "chat"),
    Command("pairs", "build a corpus of preferences, for memo train --preference", "memo.cli.data", "pairs"),
)
BUILD_EXAMPLES = (
    "memo data build texts.jsonl data/mine --tokenizer Llama-3.1-8B",
    "memo data build books/ more.txt data/mine --tokenizer bpe --vocab-size 32768 --eval-fraction 0.01",
    "memo data build fineweb/ data/web --tokenizer Llama-3.1-8B --json-key text --skip-unreadable   # *.parquet in it",
)
CHAT_EXAMPLES = ("memo data chat chats.jsonl data/chat --tokenizer Llama-3.1-8B-Instruct --eval-fraction 0.05",)
PAIRS_EXAMPLES = ("memo data pairs pairs.jsonl data/pairs --tokenizer Llama-3.1-8B-Instruct --eval-fraction 0.05",)
_SPEED_FROM_BYTES = 1 << 20
"""The speed is printed only for at least this many bytes; for fewer it means nothing."""
ABOUT = "Write OUT.bin, OUT.idx and OUT.json, in Megatron-LM's format."


def main(argv: Sequence[str]) -> int:
    """Raises MemoError for inputs that cannot be read or built, and files that cannot be written."""
    return dispatch("memo data", ABOUT, COMMANDS, argv)


@dataclass(frozen=True, kw_only=True)
class _Split:
    # In memo.data the name is split_eval.
    eval_fraction: Annotated[float, Flag(aliases=("split_eval",))] = 0.0
    """Share of the documents, in [0, 1), that goes to OUT-eval instead."""
    progress: bool = True
    """Show a progress bar with bytes per second and remaining time if standard error is a terminal."""


@dataclass(frozen=True, kw_only=True)
class _Files(_Split):
    skip_unreadable: bool = False
    """Leave out records and files that cannot be read, count them and name the first five; otherwise the first one ends
    the build."""


@dataclass(frozen=True, kw_only=True)
class _Options(_Split):
    tokenizer: str = "byte"
    """byte, a tokenizer.json or its directory, or bpe to train one on the corpus (set vocab-size)."""
    vocab_size: int | None = None
    """Vocabulary of a bpe tokenizer to train."""
    workers: Annotated[int, in_range(0, 1024)] = 0
    """Processes that tokenize; 0: one for each core. The corpus does not depend on their number."""


@dataclass(frozen=True, kw_only=True)
class _Demo(_Options):
    """Build a corpus from the sources of Python's standard library, one document a file."""

    out: Annotated[str, Flag(metavar="OUT", is_positional=True)]
    """Prefix of the files to write."""


@dataclass(frozen=True, kw_only=True)
class _Build(_Options, _Files):
    """Build a corpus of your own documents."""

    paths: Annotated[tuple[str, ...], Flag(metavar="IN... OUT", is_positional=True)]
    """.jsonl, .json (lists), .csv, .tsv, .parquet and .arrow files (each record is a document), other text files (each
    file is a document), these compressed as .gz, .zst, .bz2 or .xz, directories of them, and directories that
    `save_to_disk` of Hugging Face's datasets wrote; last the prefix of the files to write."""
    json_key: Annotated[str, Flag(aliases=("text_column",))] = "text"
    """Key of a record, or column of a table, with the text."""
    append_eod: bool = True
    """End each document with the tokenizer's end-of-document token."""


@dataclass(frozen=True, kw_only=True)
class _Rendered(_Files):
    paths: Annotated[tuple[str, ...], Flag(metavar="IN... OUT", is_positional=True)]
    """.jsonl, .json (lists), .parquet and .arrow files (each record is a conversation or a pair) and directories of
    such files; last the prefix of the files to write."""
    tokenizer: str
    """Directory of the model, or its tokenizer.json; byte: the bytes of the text."""
    chat_template: str | None = None
    """Chat template for messages: chatml, llama3 or plain, a Jinja file, or the directory of a model with a chat
    template; default: the tokenizer's chat template."""


@dataclass(frozen=True, kw_only=True)
class _Chat(_Rendered):
    """Build a corpus of conversations: records of messages, of conversations, of instruction and output, or of prompt
    and completion."""

    chat_form: ChatForm | None = None
    """Form of all records: messages (OpenAI's), conversations (ShareGPT's), instruction (Alpaca's) or prompt; default:
    decided by the fields of each record."""


@dataclass(frozen=True, kw_only=True)
class _Pairs(_Rendered):
    """Build a corpus of preferences: records of prompt, chosen and rejected, as texts or as lists of messages. A record
    without prompt has it as the common beginning of chosen and rejected."""


def _run(
    kind: type[_Split], function: Callable[..., BuildSummary], examples: Sequence[str], argv: Sequence[str]
) -> None:
    """`memo data NAME ...`: call a build function, whose arguments are named like the options, and print a summary."""
    prog = " ".join(examples[0].split()[:3])
    options: Any = parse_options(kind, argv, prog=prog, examples=examples)
    given = dict(vars(options))
    places = [given.pop("out")] if kind is _Demo else _inputs_and_out(given.pop("paths"))
    share = given.pop("eval_fraction")
    reading = Reading(**{field.name: given.pop(field.name) for field in fields(Reading) if field.name in given})
    summary = function(*places, split_eval=share, reading=reading, **given)
    print(_line(str(summary.prefix), summary.train))
    if summary.evaluation is not None:
        print(_line(f"{summary.prefix}-eval", summary.evaluation))
    if summary.num_empty_documents:
        print(f"left out {summary.num_empty_documents} documents without text")
    for line in summary.left_out:
        print(line)
    if summary.num_bytes >= _SPEED_FROM_BYTES:
        size, rate = format_bytes(summary.num_bytes), format_bytes(summary.num_bytes / max(summary.seconds, 1e-9))
        print(f"read {size} in {summary.seconds:.1f} s, {rate} a second")
    flags = "" if summary.train.num_pairs is None else " --preference dpo"
    print(f"train on it: memo train --data-path {shlex.quote(str(summary.prefix))}{flags}")


def _inputs_and_out(paths: Sequence[str]) -> list[str | Sequence[str]]:
    given = ", ".join(paths) or "none"
    require(len(paths) > 1, f"memo data needs two paths or more, but got {given}: give IN... and then OUT")
    require(
        Path(paths[-1]).name,
        f"memo data: OUT is {paths[-1]!r}, which names no file: give the prefix of those to write, such as data/mine",
    )
    return [paths[:-1], paths[-1]]


demo = partial(_run, _Demo, build_demo, ("memo data demo data/demo",))
build = partial(_run, _Build, build_corpus, BUILD_EXAMPLES)
chat = partial(_run, _Chat, build_chat, CHAT_EXAMPLES)
pairs = partial(_run, _Pairs, build_pairs, PAIRS_EXAMPLES)


def _line(prefix: str, facts: CorpusFacts) -> str:
    answers = facts.num_answer_tokens
    documents = "documents" if answers is None else "conversations" if facts.num_pairs is None else "answers in pairs"
    learned = "" if answers is None else f" ({format_count(answers)} of answers)"
    return (
        f"{prefix}: {facts.num_documents:,} {documents}, {format_count(facts.num_tokens)} tokens{learned}, "
        f"tokenizer {facts.tokenizer}, vocabulary {facts.vocab_size}"
    )
