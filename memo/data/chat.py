"""`memo data chat`: builds a corpus of conversations, in which only the answers are learned.

A second pair of files next to the tokens has the same format and the same document lengths: one byte for each token, 1
if the assistant wrote it. Tools that read Megatron's format can read the tokens without it. The mask is memory-mapped
and cut into samples like the tokens, so conversations of millions of tokens need nothing else.

    OUT.bin        OUT.idx         tokens
    OUT.mask.bin   OUT.mask.idx    answers
    OUT.json, OUT-tokenizer.json, OUT-chat_template.jinja
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memo.data.chat_template import Rendered
from memo.data.chat_templates import load_chat_template
from memo.data.conversations import ChatForm, conversation_of
from memo.data.corpus_builder import READING, BuildSummary, Reading, write_corpus
from memo.data.corpus_writer import check_share
from memo.data.encode import AnswerEncoder
from memo.data.file_kinds import CHAT_KINDS, list_files
from memo.data.tokenizer import load_tokenizer


def build_chat(
    inputs: Sequence[str | Path],
    out_prefix: str | Path,
    *,
    tokenizer: str,
    chat_template: str | Path | None = None,
    chat_form: ChatForm | None = None,
    split_eval: float = 0.0,
    reading: Reading = READING,
) -> BuildSummary:
    """Build a corpus of lines, lists and tables of conversations, and of directories that contain such files. The
    arguments are the options of `memo data chat` (memo.cli.data); `split_eval` is its --eval-fraction.

    Raises ConfigError for arguments that do not fit together and DataError, with file and line, for conversations
    that cannot be read, rendered or learned from; an older corpus of the same name then stays unchanged.
    """
    found, prefix = list_files(inputs, CHAT_KINDS), Path(out_prefix)
    check_share(prefix, split_eval)
    chosen = load_tokenizer(tokenizer)
    template = load_chat_template(tokenizer, chosen.special_texts, chat_template)

    def render(record: Any, where: str) -> tuple[Rendered]:
        return (template.render(conversation_of(record, where, chat_form)),)

    return write_corpus(found, prefix, AnswerEncoder(chosen, render, 1, template.source), split_eval, reading)
