"""`memo data pairs`: preferences, of which each is two answers to one prompt, the better one called chosen.

The forms are TRL's. With "prompt" or without it, where the answers begin alike and that is the prompt:

    texts        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    messages     {"prompt": [{"role": "user", "content": "2 + 2?"}],
                  "chosen": [{"role": "assistant", "content": "4"}],
                  "rejected": [{"role": "assistant", "content": "5"}]}
    both         {"prompt": "2 + 2?", "chosen": [user, assistant], "rejected": [user, assistant]}

A record of messages may have "tools". Messages are rendered with the chat template, as `memo data chat` does, and what
counts is what the assistant writes behind the prompt. Texts are taken as they are, and the end-of-document token behind
an answer counts as well. In the corpus chosen and rejected answers stand in turn, each with its prompt, as documents
with a mask beside them (memo.data.chat).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from memo.data.chat import answer_mask
from memo.data.chat_render import Span
from memo.data.chat_template import ChatTemplate, load_chat_template
from memo.data.completions import Document
from memo.data.conversations import ASSISTANT, Conversation, Message, kind_of, read_messages, without_nulls
from memo.data.corpus_builder import READING, BuildSummary, Reading
from memo.data.corpus_writer import CorpusWriter, check_share
from memo.data.file_kinds import CHAT_KINDS, list_files
from memo.data.left_out import LeftOut, read_each
from memo.data.progress import progress
from memo.data.records import RecordPiece, read_pieces, require_utf8
from memo.data.tokenizer import Located, Tokenizer, load_tokenizer
from memo.errors import ConfigError, DataError

_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class _Text:
    """One answer with its prompt; `spans`: its characters that count; `ends`: whether its document is ended."""

    where: str
    text: str
    spans: tuple[Span, ...]
    ends: bool


def build_pairs(
    inputs: Sequence[str | Path],
    out_prefix: str | Path,
    *,
    tokenizer: str,
    chat_template: str | Path | None = None,
    split_eval: float = 0.0,
    reading: Reading = READING,
) -> BuildSummary:
    """Build a corpus of pairs out of lines, lists and tables of preferences; arguments as of `build_chat`.

    A tokenizer without a chat template does for texts. Raises as `build_chat`.
    """
    found = list_files(inputs, CHAT_KINDS)
    left_out = LeftOut(reading.skip_unreadable, found.ignored)
    prefix = Path(out_prefix)
    check_share(prefix, split_eval)
    chosen = load_tokenizer(tokenizer)
    template: ChatTemplate | ConfigError
    try:
        template = load_chat_template(tokenizer, chosen.special_texts, chat_template)
    except ConfigError as error:
        if chat_template is not None:
            raise
        template = error  # told where messages are to be rendered
    source = template.source if isinstance(template, ChatTemplate) else None
    with ExitStack() as stack:
        corpus = CorpusWriter(stack, prefix, split_eval, chosen, source, pairs=True)
        reach = stack.enter_context(progress("rendering", found.num_bytes, reading.progress))
        for piece in read_pieces(found.files, None, left_out.refuse, lines_of_text=True):
            pairs = list(read_each(piece.places, partial(_pair, piece, template), left_out.refuse))
            encoded = _encoded([text for pair in pairs for text in pair], chosen)
            for pair, documents in zip(pairs, zip(encoded, encoded, strict=True), strict=True):
                fault = _unlearned(pair, documents)
                if fault is None:
                    corpus.add_pair(*documents)
                else:
                    left_out.refuse(fault)
            reach(piece.done_bytes)
        if not corpus.num_documents:
            raise DataError(f"no pairs in {', '.join(map(str, found.files))}; check the inputs")
        return BuildSummary(prefix, *corpus.complete(), num_empty_documents=0, left_out=tuple(left_out.lines()))


def _encoded(texts: list[_Text], tokenizer: Tokenizer) -> Iterator[Document]:
    for text, located in zip(texts, tokenizer.encode_located([each.text for each in texts]), strict=True):
        yield _document(text, located, tokenizer.eod)


def _document(text: _Text, located: Located, eod: int) -> Document:
    ids, mask = located.ids, answer_mask(located, text.spans)
    if text.ends and (not len(ids) or ids[-1] != eod):
        return np.append(ids, np.int32(eod)), np.append(mask, np.uint8(1))
    return ids, mask


def _unlearned(pair: Sequence[_Text], documents: Sequence[Document]) -> DataError | None:
    """What is wrong with a pair, one of whose answers has no token that counts; the first token is no label."""
    for side, text, (_, mask) in zip(_SIDES, pair, documents, strict=True):
        if not mask[1:].any():
            return DataError(
                f"{text.where}: {side} has no token that counts behind the prompt; see what the chat template writes, "
                "or remove the record"
            )
    return None


def _pair(piece: RecordPiece, template: ChatTemplate | ConfigError, place: int) -> tuple[_Text, _Text]:
    record, where = piece.read(place), piece.where(place)
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {kind_of(record)} where a pair should be; give a JSON object")
    if piece.unit == "row":
        record = without_nulls(record)
    kinds = {type(record.get(side)) for side in _SIDES}
    if kinds == {str} and isinstance(record.get("prompt"), str | None):
        return _pair_of_texts(record, where)
    if kinds == {list}:
        if isinstance(template, ConfigError):
            raise template
        return _pair_of_messages(record, where, template)
    told = ", ".join(f"{name} is {kind_of(record.get(name))}" for name in ("prompt", *_SIDES))
    raise DataError(
        f"{where}: {told}; give chosen and rejected as texts, with a text or nothing as prompt, or as lists of messages"
    )


def _pair_of_texts(record: dict[str, Any], where: str) -> tuple[_Text, _Text]:
    prompt, answers = record.get("prompt"), [record[side] for side in _SIDES]
    if prompt is None:
        shared = _shared(*answers)
        shared -= shared > 0 and answers[0][shared - 1] == " "  # as TRL: tokens begin with their blank
        prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
    for text in (prompt, *answers):
        require_utf8(text, where)
    first, second = (
        _Text(where, prompt + answer, ((len(prompt), len(prompt + answer)),), ends=True) for answer in answers
    )
    return first, second


def _pair_of_messages(record: dict[str, Any], where: str, template: ChatTemplate) -> tuple[_Text, _Text]:
    answers = [read_messages(record[side], side, where) for side in _SIDES]
    given = record.get("prompt")
    if given is None:
        prompt = answers[0][: _shared(*answers)]
    else:
        prompt = [{"role": "user", "content": given}] if isinstance(given, str) else []
        prompt = prompt or read_messages(given, "prompt", where)
    if all(answer[: len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt) :] for answer in answers]
    tools = record.get("tools")
    first, second = (
        _rendered([*prompt, *answer], len(prompt), tools, f"{where}: {side}", template)
        for side, answer in zip(_SIDES, answers, strict=True)
    )
    return first, second


def _rendered(
    messages: list[Message], num_prompt: int, tools: list[Any] | None, where: str, template: ChatTemplate
) -> _Text:
    learned = tuple(i >= num_prompt for i, message in enumerate(messages) if message["role"] == ASSISTANT)
    if not any(learned):
        raise DataError(
            f"{where} has no message of the role {ASSISTANT} behind the prompt; add one or remove the record"
        )
    rendered = template.render(Conversation(where, tuple(messages), learned, tools))
    require_utf8(rendered.text, where)
    return _Text(where, rendered.text, rendered.spans, ends=False)


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many elements are the same at the beginning of both."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
