"""`memo data chat`: from conversations to a corpus of which the answers alone are learned.

Beside the tokens lies a second pair of files of the same format with the same document lengths: one byte for each
token, 1 where the assistant wrote it. Every tool that reads Megatron's format can read the tokens without it. The mask
is mapped into memory and cut into samples as the tokens are, so conversations of millions of tokens need nothing else.

    OUT.bin        OUT.idx         tokens
    OUT.mask.bin   OUT.mask.idx    answers
    OUT.json, OUT-tokenizer.json, OUT-chat_template.jinja
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memo.data.chat_render import Span
from memo.data.chat_template import ChatTemplate, Rendered, load_chat_template
from memo.data.conversations import ChatForm, Conversation, conversations_of
from memo.data.corpus_builder import READING, BuildSummary, Reading
from memo.data.corpus_writer import CorpusWriter, check_share
from memo.data.file_kinds import CHAT_KINDS, list_files
from memo.data.left_out import LeftOut, Refuse, read_each
from memo.data.progress import progress
from memo.data.records import read_pieces, require_utf8
from memo.data.tokenizer import Located, Tokenizer, load_tokenizer
from memo.errors import DataError


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
    """Build a corpus of lines, lists and tables of conversations, and of directories that hold some.

    tokenizer: directory of the model, its tokenizer.json, or `byte`.
    chat_template: chatml, llama3 or plain, a file of Jinja or a directory that has one; default: that of `tokenizer`.
    chat_form: of all records (`memo.data.conversations` has the forms); default: each tells its own.
    split_eval: share of the conversations, in [0, 1), that goes to OUT-eval instead, as in `build_corpus`.

    Raises ConfigError for arguments that do not fit together and DataError, with file and line, for conversations
    that cannot be read, rendered or learned from; an older corpus of the same name then stays as it was.
    """
    found = list_files(inputs, CHAT_KINDS)
    left_out = LeftOut(reading.skip_unreadable, found.ignored)
    prefix = Path(out_prefix)
    check_share(prefix, split_eval)
    chosen = load_tokenizer(tokenizer)
    template = load_chat_template(tokenizer, chosen.special_texts, chat_template)
    with ExitStack() as stack:
        corpus = CorpusWriter(stack, prefix, split_eval, chosen, template.source)
        reach = stack.enter_context(progress("rendering", found.num_bytes, reading.progress))
        for piece in read_pieces(found.files, None, left_out.refuse, lines_of_text=True):
            conversations = conversations_of(piece, left_out.refuse, chat_form)
            for ids, mask in _encode(conversations, chosen, template, left_out.refuse):
                corpus.add(ids, mask)
            reach(piece.done_bytes)
        if not corpus.num_documents:
            raise DataError(f"no conversations in {', '.join(map(str, found.files))}; check the inputs")
        return BuildSummary(prefix, *corpus.complete(), num_empty_documents=0, left_out=tuple(left_out.lines()))


def _rendered(template: ChatTemplate, conversation: Conversation) -> tuple[str, Rendered]:
    """Where a conversation stands, and its text."""
    rendered = template.render(conversation)
    require_utf8(rendered.text, conversation.where)
    return conversation.where, rendered


def _encode(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, template: ChatTemplate, refuse: Refuse
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
    """Tokens and mask of each conversation of a piece, which are tokenized together to keep all cores busy."""
    rendered = list(read_each(conversations, partial(_rendered, template), refuse))
    encoded = tokenizer.encode_located([conversation.text for _, conversation in rendered])
    for (where, conversation), located in zip(rendered, encoded, strict=True):
        mask = answer_mask(located, conversation.spans)
        if mask[1:].any():  # the first token is no label
            yield located.ids, mask
        else:
            refuse(DataError(f"{where}: {template.name} renders no answer to learn from; see what it does with it"))


def answer_mask(located: Located, spans: Sequence[Span]) -> NDArray[np.uint8]:
    """1 for each token, [n], that has a character of one of `spans`.

    Characters between two tokens, which are blanks, belong to the later one.
    """
    ends = np.maximum.accumulate(located.offsets[:, 1])
    begins = np.minimum(located.offsets[:, 0], np.concatenate(([0], ends[:-1])))
    mask = np.zeros(len(ends), dtype=np.uint8)
    for begin, end in spans:
        mask |= (begins < end) & (ends > begin)
    return mask
