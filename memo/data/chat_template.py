"""Chat templates: a conversation as the text that the model reads, and which characters of it the assistant wrote.

A model's own template (Jinja, in its tokenizer_config.json or chat_template.jinja) is rendered as transformers does,
in a sandbox: templates are code of strangers. Which characters the assistant wrote is found in one of two ways:

    {% generation %} ... {% endgeneration %}    the template marks them itself, or else
    prefixes                                    what the text grows by from the prompt for an answer to the answer:

        messages 0 .. i - 1, and the prompt for an answer    <user>Hi<end><assistant>
        messages 0 .. i                                      <user>Hi<end><assistant>Hello!<end>
        the whole conversation                               <user>Hi<end><assistant>Hello!<end><user> ...
        learned                                                                      ^^^^^^^^^^^

The second holds only where each text begins the next, which is checked. Blanks between the special token that ends an
answer and the next message belong to neither: a model that answers has stopped by then.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memo.artifacts.model_directory import model_file
from memo.data.conversations import ASSISTANT, Conversation
from memo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jinja2.environment import Template

TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Around what a template marks. Unicode gives these two to no character, for use inside of programs."""

Span = tuple[int, int]
"""Characters [begin, end) of a text."""


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation and the parts of it that are learned, in order."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """Renders conversations.

    Args:
        source: Jinja.
        variables: of the template, such as bos_token and eos_token.
        special_texts: how special tokens are spelled; one of them ends an answer.
        name: of the file, for messages.
    """

    def __init__(
        self, source: str, *, variables: Mapping[str, str], special_texts: Sequence[str], name: str | Path
    ) -> None:
        """Raises DataError for a template that Jinja cannot read."""
        from jinja2 import TemplateError

        self.source, self.name = source, name
        self._variables, self._special_texts = dict(variables), tuple(special_texts)
        self._marks = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source) is not None
        try:
            self._template = _compile(source)
        except TemplateError as error:
            raise DataError(f"{name}: no valid chat template ({error}); repair it") from error

    def render(self, conversation: Conversation) -> Rendered:
        """The text and its learned parts.

        Raises DataError, with the conversation's file and line, where the template refuses the conversation or
        where it cannot be told what the assistant wrote.
        """
        text = self._render(conversation, len(conversation.messages))
        if self._marks:
            text, spans = self._marked(text, conversation)
        else:
            spans = self._between_prefixes(text, conversation)
        if all(conversation.learned):
            return Rendered(text, tuple(spans))
        if len(spans) != len(conversation.learned):  # which of them is the message that is not to be learned?
            raise DataError(
                f"{conversation.where}: a message has weight 0, but {self.name} marks {len(spans)} answers of "
                f"{len(conversation.learned)}; mark each once, or leave weight out"
            )
        return Rendered(text, tuple(s for s, learned in zip(spans, conversation.learned, strict=True) if learned))

    def _render(self, conversation: Conversation, num_messages: int, *, prompt: bool = False) -> str:
        """The first messages; `prompt`: and what asks the model for an answer."""
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=conversation.messages[:num_messages],
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            what = "the conversation" if num_messages == len(conversation.messages) else f"its first {num_messages}"
            messages = "" if num_messages == len(conversation.messages) else " messages"
            raise DataError(
                f"{conversation.where}: {self.name} refuses {what}{messages} ({error}); repair the line, or give "
                "another chat template"
            ) from error

    def _marked(self, marked: str, conversation: Conversation) -> tuple[str, list[Span]]:
        """Without the marks, and where they stood."""
        said = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
        if _BEGIN in said or _END in said:
            raise DataError(
                f"{conversation.where}: holds U+FDD0 or U+FDD1, which are no characters and mark answers here; "
                "remove them"
            )
        first, *pieces = marked.split(_BEGIN)
        text, spans = first, []
        for piece in pieces:
            answer, _, rest = piece.partition(_END)
            spans.append((len(text), len(text) + len(answer)))
            text += answer + rest
        return text, spans

    def _between_prefixes(self, text: str, conversation: Conversation) -> list[Span]:
        spans = []
        for i, message in enumerate(conversation.messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self._render(conversation, i, prompt=True)
            answered = self._render(conversation, i + 1)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise DataError(
                    f"{conversation.where}: {self.name} writes messages[{i}] in another way when more follows, or "
                    "without the prompt for an answer, so that what the assistant wrote cannot be told; put "
                    "{% generation %} and {% endgeneration %} around it in a copy of the template, and name the copy "
                    "with --chat-template"
                )
            spans.append((len(prompt), self._end_of_answer(text, len(prompt), len(answered))))
        return spans

    def _end_of_answer(self, text: str, begin: int, end: int) -> int:
        answer = text[begin:end].rstrip()
        return begin + len(answer) if self._special_texts and answer.endswith(self._special_texts) else end


def load_chat_template(
    tokenizer: str | Path, special_texts: Sequence[str], given: str | Path | None = None
) -> ChatTemplate:
    """The template of a tokenizer's directory (or of the directory of a tokenizer.json), or a `given` one.

    Args:
        given: a file of Jinja, or a directory as above; the variables remain those of `tokenizer`.

    Raises ConfigError where there is none, and DataError for one that cannot be read.
    """
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config = _read_config(folder)
    if given is None:
        found = _find(folder, config)
        if found is None:
            raise ConfigError(
                f"--tokenizer {tokenizer} comes without a chat template (neither {TEMPLATE_FILE} nor chat_template in "
                f"{_TOKENIZER_CONFIG}): give --chat-template, a file of Jinja or the directory of a model that has one"
            )
    elif Path(given).is_dir():
        found = _find(Path(given), _read_config(Path(given)))
        if found is None:
            raise ConfigError(f"--chat-template {given} is a directory without a chat template: name a file of Jinja")
    else:
        found = given, _read_text(Path(given))
    name, source = found
    return ChatTemplate(source, variables=_special_tokens(config), special_texts=special_texts, name=name)


def _find(folder: Path, config: Mapping[str, Any]) -> tuple[str | Path, str] | None:
    """Name and source; the file comes before the configuration, as in transformers."""
    if model_file(folder, TEMPLATE_FILE) is not None:
        return folder / TEMPLATE_FILE, _read_text(folder / TEMPLATE_FILE)
    name = f"chat_template in {folder / _TOKENIZER_CONFIG}"
    value = config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is None:
        return None
    if not isinstance(value, str):
        raise DataError(f"{name} is no text; repair it, or give --chat-template")
    return name, value


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing."""
    path = folder / _TOKENIZER_CONFIG
    if model_file(folder, _TOKENIZER_CONFIG) is None:
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object; download it again")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"--chat-template {path}: {reason}: give a file of Jinja, or a directory that has one"
        ) from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, each a text or an object with one."""
    values = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _compile(source: str) -> "Template":
    """In the environment that transformers' templates are written for. Raises jinja2.TemplateError."""
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
