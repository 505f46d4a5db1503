"""Chat templates: they turn a conversation into the model's text and tell which characters the assistant wrote.

A model's own template (Jinja, in its tokenizer_config.json or chat_template.jinja) is rendered as transformers does: in
Jinja's sandbox, because templates are untrusted code. The characters of the assistant are found in one of two ways:

    {% generation %} ... {% endgeneration %}    the template marks them itself, or else
    prefixes                                    the text that an answer adds to the prompt for it:

        messages 0 .. i - 1, and the prompt for an answer    <user>Hi<end><assistant>
        messages 0 .. i                                      <user>Hi<end><assistant>Hello!<end>
        the whole conversation                               <user>Hi<end><assistant>Hello!<end><user> ...
        learned                                                                      ^^^^^^^^^^^

Prefixes work only if each text is a prefix of the next, which is checked. Blanks between the special token that ends an
answer and the next message are not learned, because a model that answers has stopped by then.
"""

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import compress
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from memo.artifacts.memory_limit import limited_memory
from memo.data.conversations import ASSISTANT, Conversation, Message
from memo.errors import DataError

TIME_LIMIT_S = 3.0
"""Processor time to compile a template or to render a text, thousands of times the usual time."""
_MEMORY_BYTES, _MEMORY_BYTES_PER_CHARACTER = 512 << 20, 64
"""Limit of additional memory: a constant, and bytes for each character of a conversation: for the text, its pieces and
prefixes, at four bytes a character."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""They enclose the parts that a template marks. Unicode reserves both for use inside programs: they are no characters.
"""


@dataclass(frozen=True)
class Rendered:
    """The text of a document, and the file and line of its record, for messages."""

    where: str
    text: str
    spans: tuple[tuple[int, int], ...]
    """Characters [begin, end) of the learned parts, in order."""
    ends: bool = False
    """Whether an end-of-document token follows the text, and is learned."""


class _Generation(Extension):
    """{% generation %}: marks the text inside the block."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 reads it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _compiled(source: str) -> Template:
    """The template in the environment that transformers gives to templates."""

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # Jinja's own escapes HTML; dates and decimals of tables become text.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=str, **options)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _out_of_time(*_: object) -> None:
    raise TimeoutError


@contextlib.contextmanager
def _limited(where: str, say: Callable[[str], str], num_characters: int = 0) -> Iterator[None]:
    """A context for what a template computes, within limits of memory and, in the main thread, of processor time.

    Turns all errors of a template into a DataError of one line, which begins with `where`; `say(reason)` is the rest of
    it for errors that are no limits. `num_characters`: of the conversation.
    """
    memory_bytes = _MEMORY_BYTES + _MEMORY_BYTES_PER_CHARACTER * num_characters
    has_timer = threading.current_thread() is threading.main_thread()
    try:
        before = signal.signal(signal.SIGVTALRM, _out_of_time) if has_timer else None
        try:
            if has_timer:
                signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT_S)
            with limited_memory(memory_bytes):
                yield
        finally:
            if has_timer:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
                signal.signal(signal.SIGVTALRM, before)
    except TimeoutError:
        raise DataError(
            f"{where} takes more than {TIME_LIMIT_S:.0f} s of processor time; give another chat template"
        ) from None
    except MemoryError:
        raise DataError(
            f"{where} needs more than {memory_bytes >> 20} MiB of memory; give another chat template"
        ) from None
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        reason = words if isinstance(error, TemplateError) and words else f"{type(error).__name__}: {words}"
        raise DataError(f"{where} {say(reason)}") from None


class ChatTemplate:
    """Renders conversations by a template in Jinja."""

    def __init__(
        self, source: str, *, variables: Mapping[str, str], special_texts: Sequence[str], name: str | Path
    ) -> None:
        """`variables`, such as bos_token and eos_token; `special_texts`: spellings of special tokens, one of which ends
        an answer; `name` of the file, for messages. Raises DataError for a template that Jinja cannot compile."""
        self.source, self.name, self._special_texts = source, name, tuple(special_texts)
        self._variables = dict(variables)
        self._marks = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source) is not None
        with _limited(f"{name}:", lambda reason: f"no valid chat template ({reason}); repair it"):
            self._template = _compiled(source)

    def render(self, conversation: Conversation) -> Rendered:
        """Render the text of a conversation and find its learned parts.

        Raises DataError, with the conversation's file and line, if the template refuses the conversation or does not
        reveal what the assistant wrote.
        """
        where, learned = f"{conversation.where}: {self.name}", conversation.learned
        text = self._text(conversation.messages, conversation.variables, where, "the conversation")
        if not self._marks:
            return Rendered(conversation.where, text, tuple(self._added(text, conversation, where)))
        text, spans = _without_marks(text, conversation, where)
        if not all(learned):
            if len(spans) != len(learned):  # spans cannot be matched with messages
                raise DataError(
                    f"{conversation.where}: a message has weight 0, but {self.name} marks {len(spans)} answers of "
                    f"{len(learned)}; mark each once, or leave weight out"
                )
            spans = [span for span, is_learned in zip(spans, learned, strict=True) if is_learned]
        return Rendered(conversation.where, text, tuple(spans))

    def prompt(self, messages: tuple[Message, ...], where: str) -> str:
        """The text up to where the model answers. Raises the DataErrors of `render`, which begin with `where`."""
        text = self._text(messages, {}, f"{where}: {self.name}", "the conversation", asks=True)
        return text.replace(_BEGIN, "").replace(_END, "") if self._marks else text

    def end_of_answer(self) -> str | None:
        """The special token that ends an answer; None if the template writes none, or refuses a plain question."""
        question, answer = {"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}
        try:
            rendered = self.render(Conversation("a question and its answer", (question, answer), (True,)))
        except DataError:  # such as from a template that needs a system message first
            return None
        learned = "".join(rendered.text[begin:end] for begin, end in rendered.spans[-1:])
        ends = [text for text in self._special_texts if learned.rstrip().endswith(text)]
        return max(ends, key=len, default=None)

    def _text(
        self, messages: Sequence[Message], variables: Mapping[str, Any], where: str, what: str, asks: bool = False
    ) -> str:
        """Render messages. With `asks` the text ends where the model shall answer."""
        given = {"tools": None, "documents": None, **self._variables, **variables, "messages": list(messages)}
        size = sum(len(text) for message in messages for text in message.values() if isinstance(text, str))

        def say(reason: str) -> str:
            return f"refuses {what} ({reason}); repair the line, or give another chat template"

        with _limited(where, say, size):
            return self._template.render(**given, add_generation_prompt=asks)

    def _added(self, text: str, conversation: Conversation, where: str) -> list[tuple[int, int]]:
        """The span [begin, end) of each learned answer in `text`: what it adds to the prompt for it."""
        messages, spans = conversation.messages, []
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        for i in compress(answers, conversation.learned):
            prompt, answered = (
                self._text(messages[:count], conversation.variables, where, f"its first {count} messages", asks)
                for count, asks in ((i, True), (i + 1, False))
            )
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise DataError(
                    f"{where} writes messages[{i}] in another way when more follows, or without the prompt for an "
                    "answer, so that what the assistant wrote cannot be told; put {% generation %} and "
                    "{% endgeneration %} around it in a copy of the template, and name the copy with --chat-template"
                )
            answer = answered[len(prompt) :].rstrip()
            ends_there = self._special_texts and answer.endswith(self._special_texts)
            spans.append((len(prompt), len(prompt) + len(answer) if ends_there else len(answered)))
        return spans


def _without_marks(marked: str, conversation: Conversation, where: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its marks, and the spans that they enclosed."""
    said = json.dumps([conversation.messages, dict(conversation.variables)], ensure_ascii=False, default=str)
    if _BEGIN in said or _END in said:
        raise DataError(
            f"{where} marks answers with U+FDD0 and U+FDD1, which are no characters, but the conversation holds them; "
            "remove them"
        )
    text, *pieces = marked.split(_BEGIN)
    spans = []
    for piece in pieces:
        answer, _, rest = piece.partition(_END)
        spans.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return text, spans
