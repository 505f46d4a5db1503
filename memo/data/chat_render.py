"""The program of a process that renders conversations with one chat template, which is untrusted code.

The first line of its input is JSON with the arguments of `_Renderer`, each further line a conversation. Each line also
has the limit of its processor time; the answer to each line is one line. Jinja's sandbox keeps the template away from
other objects, as in transformers. It does not limit time or memory, and no check inside Python can stop 'a' * 10**11,
2**10**10, or deeply nested loops. Here they can at most end this process: RLIMIT_AS limits its memory, and a timer
whose signal is not handled limits its processor time.
"""

import contextlib
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from memo.artifacts.memory_limit import address_space_bytes, limited_memory

_MEMORY_BYTES, _MEMORY_BYTES_PER_CHARACTER = 512 << 20, 64
"""Limit of memory: a constant, and bytes for each character of a conversation in JSON: for the text, its pieces and
prefixes, at four bytes a character."""
_MAX_CHARACTERS, _MAX_GROWTH = 1 << 20, 16
"""Limit of the text: a constant, and characters for each character of the conversation in JSON."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""They enclose the parts that a template marks. Unicode reserves both for use inside programs: they are no characters.
"""


class _Refusal(Exception):
    """A conversation cannot be rendered; the message continues a sentence that begins with the template's name."""


class _Generation(Extension):
    """{% generation %}: marks the text inside the block."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 reads it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _Renderer:
    """Renders one template in the environment that transformers gives to templates."""

    def __init__(self, source: str, variables: dict[str, str], special_texts: list[str]) -> None:
        """`variables`: such as eos_token; `special_texts`: spellings of special tokens, one of which ends an answer."""
        self._variables, self._special_texts = variables, tuple(special_texts)
        self._marks = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source) is not None

        def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # Jinja's own escapes HTML

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        with _told(lambda reason: f"no valid chat template ({reason}); repair it"):
            self._template = environment.from_string(source)

    def conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, asks: bool, most: int
    ) -> dict[str, Any]:
        """Render a conversation: the text, of at most `most` characters, and the span [begin, end) of each answer in
        it. With `asks` the text ends where the model shall answer."""

        def text_of(count: int, prompt: bool = False) -> str:
            what = "the conversation" if count == len(messages) else f"its first {count} messages"
            with _told(lambda reason: f"refuses {what} ({reason}); repair the line, or give another chat template"):
                text = self._template.render(
                    messages=messages[:count],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=prompt,
                    **self._variables,
                )
            if len(text) > most:
                raise _Refusal(
                    f"writes more than {most} characters for the conversation, far more than it holds; give another "
                    "chat template"
                )
            return text

        text = text_of(len(messages), asks)
        if self._marks:
            return _without_marks(text, messages, tools)
        spans = []
        for i, message in enumerate(() if asks else messages):
            if message["role"] != "assistant":
                continue
            prompt, answered = text_of(i, prompt=True), text_of(i + 1)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise _Refusal(
                    f"writes messages[{i}] in another way when more follows, or without the prompt for an answer, so "
                    "that what the assistant wrote cannot be told; put {% generation %} and {% endgeneration %} "
                    "around it in a copy of the template, and name the copy with --chat-template"
                )
            answer = answered[len(prompt) :].rstrip()
            ends_there = self._special_texts and answer.endswith(self._special_texts)
            spans.append((len(prompt), len(prompt) + len(answer) if ends_there else len(answered)))
        return {"text": text, "spans": spans}


@contextlib.contextmanager
def _told(say: Callable[[str], str]) -> Iterator[None]:
    """Turn errors of Jinja, and all other errors of a template, into a _Refusal of one line."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        reason = words if isinstance(error, TemplateError) and words else f"{type(error).__name__}: {words}"
        raise _Refusal(say(reason)) from None


def _without_marks(marked: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> dict[str, Any]:
    """Remove the marks; returns the text and the spans that they enclosed."""
    said = json.dumps([messages, tools], ensure_ascii=False)
    if _BEGIN in said or _END in said:
        raise _Refusal(
            "marks answers with U+FDD0 and U+FDD1, which are no characters, but the conversation holds them; remove "
            "them"
        )
    text, *pieces = marked.split(_BEGIN)
    spans = []
    for piece in pieces:
        answer, _, rest = piece.partition(_END)
        spans.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return {"text": text, "spans": spans}


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C, and ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer = None
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        memory_bytes = _MEMORY_BYTES + _MEMORY_BYTES_PER_CHARACTER * len(line)
        found: dict[str, Any] = {}
        signal.setitimer(signal.ITIMER_PROF, asked.pop("time_limit_s"))
        try:
            with limited_memory(address_space_bytes() + memory_bytes):
                if renderer is None:
                    renderer = _Renderer(**asked)
                else:
                    found = renderer.conversation(**asked, most=_MAX_CHARACTERS + _MAX_GROWTH * len(line))
        except _Refusal as refusal:
            found = {"refusal": str(refusal)}
        except MemoryError:
            found = {"refusal": f"needs more than {memory_bytes >> 20} MiB of memory; give another chat template"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
