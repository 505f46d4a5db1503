"""`memo data pairs`: builds a corpus of preferences, each with a chosen and a rejected answer to one prompt.

The forms are TRL's. Without "prompt", the common beginning of both answers is the prompt:

    texts        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    messages     {"prompt": [{"role": "user", "content": "2 + 2?"}],
                  "chosen": [{"role": "assistant", "content": "4"}],
                  "rejected": [{"role": "assistant", "content": "5"}]}
    both         {"prompt": "2 + 2?", "chosen": [user, assistant], "rejected": [user, assistant]}

Messages are rendered with the chat template, as by `memo data chat`, and the
assistant's tokens after the prompt are learned. Texts are used unchanged, and the end-of-document token after an answer
is learned as well. The documents of the corpus are chosen and rejected answers in turn, each with its prompt, with a
mask next to them (memo.data.chat).
"""

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from memo.data.chat_template import ChatTemplate, Rendered
from memo.data.chat_templates import load_chat_template
from memo.data.conversations import ASSISTANT, Conversation, kind_of, read_messages, read_variables
from memo.data.corpus_builder import READING, BuildSummary, Reading, write_corpus
from memo.data.corpus_writer import check_share
from memo.data.encode import AnswerEncoder
from memo.data.file_kinds import CHAT_KINDS, list_files
from memo.data.tokenizer import load_tokenizer
from memo.errors import ConfigError, DataError

SIDES = ("chosen", "rejected")


def build_pairs(
    inputs: Sequence[str | Path],
    out_prefix: str | Path,
    *,
    tokenizer: str,
    chat_template: str | Path | None = None,
    split_eval: float = 0.0,
    reading: Reading = READING,
) -> BuildSummary:
    """Build a corpus of pairs from lines, lists and tables of preferences; arguments: see `build_chat`.

    For texts the tokenizer needs no chat template. Raises the errors of `build_chat`.
    """
    found, prefix = list_files(inputs, CHAT_KINDS), Path(out_prefix)
    check_share(prefix, split_eval)
    chosen = load_tokenizer(tokenizer)
    template: ChatTemplate | ConfigError
    try:
        template = load_chat_template(tokenizer, chosen.special_texts, chat_template)
    except ConfigError as error:
        if chat_template is not None:
            raise
        template = error  # raised when the first messages shall be rendered
    source = template.source if isinstance(template, ChatTemplate) else None
    encoder = AnswerEncoder(chosen, partial(_pair, template), len(SIDES), source)
    return write_corpus(found, prefix, encoder, split_eval, reading)


def _pair(template: ChatTemplate | ConfigError, record: Any, where: str) -> tuple[Rendered, ...]:
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {kind_of(record)} where a pair should be; give a JSON object")
    kinds = {type(record.get(side)) for side in SIDES}
    if kinds == {str} and isinstance(record.get("prompt"), str | None):
        return _pair_of_texts(record, where)
    if kinds == {list}:
        if isinstance(template, ConfigError):
            raise template
        return _pair_of_messages(record, where, template)
    told = ", ".join(f"{name} is {kind_of(record.get(name))}" for name in ("prompt", *SIDES))
    raise DataError(
        f"{where}: {told}; give chosen and rejected as texts, with a text or nothing as prompt, or as lists of messages"
    )


def _pair_of_texts(record: dict[str, Any], where: str) -> tuple[Rendered, ...]:
    prompt, texts = record.get("prompt"), [record[side] for side in SIDES]
    if prompt is None:
        begin = _shared(*texts)
        if not begin:  # as in files that have the prompt under another key
            raise DataError(
                f"{where}: prompt is missing, and chosen and rejected have no common beginning; give prompt, a text "
                "that may be empty"
            )
        begin -= texts[0][begin - 1] == " "  # as in TRL, because tokens begin with their blank
    else:
        begin, texts = len(prompt), [prompt + text for text in texts]
    return tuple(
        Rendered(f"{where}: {side}", text, ((begin, len(text)),), ends=True)
        for side, text in zip(SIDES, texts, strict=True)
    )


def _pair_of_messages(record: dict[str, Any], where: str, template: ChatTemplate) -> tuple[Rendered, ...]:
    answers = [read_messages(record[side], side, where) for side in SIDES]
    given = record.get("prompt")
    if given is None:
        prompt = answers[0][: _shared(*answers)]
    elif isinstance(given, str):
        prompt = [{"role": "user", "content": given}]
    else:
        prompt = read_messages(given, "prompt", where)
    if all(answer[: len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt) :] for answer in answers]
    found = []
    for side, answer in zip(SIDES, answers, strict=True):
        messages = (*prompt, *answer)
        learned = tuple(i >= len(prompt) for i, message in enumerate(messages) if message["role"] == ASSISTANT)
        if not any(learned):
            raise DataError(
                f"{where}: {side} has no message of the role {ASSISTANT} behind the prompt; add one or remove the "
                "record"
            )
        found.append(
            template.render(Conversation(f"{where}: {side}", messages, learned, read_variables(record, where)))
        )
    return tuple(found)


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
