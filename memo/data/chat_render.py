"""What a chat template makes of a conversation, and which characters of it the assistant wrote.

This code runs only in the process of `memo.data.template_process`. A template is a program of strangers: Jinja's
sandbox keeps it away from other objects, and the limits of that process keep it from taking all time and memory.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from memo.data.conversations import ASSISTANT

if TYPE_CHECKING:
    from jinja2.environment import Template

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""They stand around what a template marks. Unicode keeps both for use inside of programs: no character has them."""
_SHOWN_CHARACTERS = 300

Span = tuple[int, int]
"""Characters [begin, end) of a text."""


class TemplateRefusal(Exception):
    """Why there is no text; the message continues a sentence that begins with the name of the template."""


class Renderer:
    """One template, ready to render.

    Args:
        source: Jinja.
        variables: of the template, such as bos_token and eos_token.
        special_texts: how special tokens are spelled; one of them ends an answer.
    """

    def __init__(self, source: str, variables: Mapping[str, str], special_texts: Sequence[str]) -> None:
        """Raises whatever Jinja and Python's compiler raise."""
        self._variables, self._special_texts = dict(variables), tuple(special_texts)
        self._marks = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source) is not None
        self._template = _compile(source)

    def num_renderings(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """How often the template runs for a conversation."""
        return 1 if self._marks else 1 + 2 * sum(message["role"] == ASSISTANT for message in messages)

    def conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, max_characters: int
    ) -> tuple[str, list[Span]]:
        """The text and the answers in it. Raises TemplateRefusal, also for a text of more than `max_characters`."""

        def text_of(num_messages: int, prompt: bool = False) -> str:
            return self._render(messages, num_messages, tools, prompt, max_characters)

        text = text_of(len(messages))
        if self._marks:
            return _without_marks(text, messages, tools)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt, answered = text_of(i, prompt=True), text_of(i + 1)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise TemplateRefusal(
                    f"writes messages[{i}] in another way when more follows, or without the prompt for an answer, so "
                    "that what the assistant wrote cannot be told; put {% generation %} and {% endgeneration %} "
                    "around it in a copy of the template, and name the copy with --chat-template"
                )
            spans.append((len(prompt), self._end_of_answer(text, len(prompt), len(answered))))
        return text, spans

    def prompt(self, messages: list[dict[str, Any]], max_characters: int) -> str:
        """The text of the messages up to where the model answers. Raises TemplateRefusal, as `conversation`."""
        text = self._render(messages, len(messages), None, True, max_characters)
        return _without_marks(text, messages, None)[0] if self._marks else text

    def _render(
        self, messages: list[dict[str, Any]], count: int, tools: list[Any] | None, prompt: bool, max_characters: int
    ) -> str:
        """The first `count` messages; `prompt`: and what asks the model for an answer."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=messages[:count], tools=tools, documents=None, add_generation_prompt=prompt, **self._variables
            ):
                pieces.append(piece)
                length += len(piece)
                if length > max_characters:
                    break
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may raise whatever Python raises
            what = "the conversation" if count == len(messages) else f"its first {count} messages"
            raise TemplateRefusal(
                f"refuses {what} ({reason_of(error)}); repair the line, or give another chat template"
            ) from None
        if length > max_characters:
            raise TemplateRefusal(
                f"writes more than {max_characters} characters for the conversation, far more than it holds; give "
                "another chat template"
            )
        return "".join(pieces)

    def _end_of_answer(self, text: str, begin: int, end: int) -> int:
        answer = text[begin:end].rstrip()
        return begin + len(answer) if self._special_texts and answer.endswith(self._special_texts) else end


def reason_of(error: BaseException) -> str:
    """One line, never long: a template chooses the words of its own errors."""
    from jinja2 import TemplateError

    words = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
    return words if isinstance(error, TemplateError) and words else f"{type(error).__name__}: {words}"


def _without_marks(marked: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[str, list[Span]]:
    """The text, and where the marks stood."""
    said = json.dumps([messages, tools], ensure_ascii=False, default=str)
    if _BEGIN in said or _END in said:
        raise TemplateRefusal(
            "marks answers with U+FDD0 and U+FDD1, which are no characters, but the conversation holds them; remove "
            "them"
        )
    first, *pieces = marked.split(_BEGIN)
    text, spans = [first], []
    begin = len(first)
    for piece in pieces:
        answer, _, rest = piece.partition(_END)
        spans.append((begin, begin + len(answer)))
        text += [answer, rest]
        begin += len(answer) + len(rest)
    return "".join(text), spans


def _compile(source: str) -> "Template":
    """In the environment that transformers' templates are written for."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: marks what stands inside."""

        tags = {"generation"}  # noqa: RUF012  as jinja2 reads it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Macro) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        """Jinja's own filter escapes HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
