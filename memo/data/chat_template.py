"""Chat templates: they turn a conversation into the model's text and tell which characters the assistant wrote.

A model's own template (Jinja, in its tokenizer_config.json or chat_template.jinja) is rendered as transformers does, in
a process of its own (chat_render.py), because templates are untrusted code. The characters of the assistant are found
in one of two ways:

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
import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memo.artifacts.model_directory import model_file
from memo.artifacts.python_process import python_command
from memo.artifacts.reading import Source, read_json_object, read_text
from memo.config import RunConfig
from memo.config.blend import read_blend
from memo.data.chat_templates import CHAT_TEMPLATES
from memo.data.conversations import ASSISTANT, Conversation, Message
from memo.data.tokenizer import ByteTokenizer
from memo.errors import ConfigError, DataError

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_SUFFIX = f"-{TEMPLATE_FILE}"
"""The prefix of a corpus of conversations and this suffix name the template that rendered the corpus."""
MAX_SOURCE_CHARACTERS = 1 << 18
"""Limit of a template; the longest templates in use have a tenth of it."""
TIME_LIMIT_S, _MESSAGE_LIMIT_S = 3.0, 0.1
"""Processor time to compile the template or render one conversation, thousands of times the usual time; and additional
time for each message, because a conversation with many answers is rendered many times."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_ACCEPTED = f"one of {', '.join(CHAT_TEMPLATES)}, a file of Jinja, or the directory of a model that has one"


@dataclass(frozen=True)
class Rendered:
    """The text of a document.

    Attributes:
        where: the file and line of its record, for messages.
        spans: characters [begin, end) of the learned parts, in order.
        ends: whether an end-of-document token follows the text, and is learned.
    """

    where: str
    text: str
    spans: tuple[tuple[int, int], ...]
    ends: bool = False


class ChatTemplate:
    """Renders conversations, in a process that ends with this object.

    Args:
        source: the template in Jinja.
        variables: variables of the template, such as bos_token and eos_token.
        special_texts: spellings of special tokens, one of which ends an answer.
        name: name of the file, for messages.
    """

    def __init__(
        self, source: str, *, variables: Mapping[str, str], special_texts: Sequence[str], name: str | Path
    ) -> None:
        """Raises DataError for a template that Jinja cannot compile within the limits of chat_render.py."""
        self.source, self.name, self._special_texts = source, name, tuple(special_texts)
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise DataError(
                f"{name}: a chat template of {len(source)} characters; memo takes up to {MAX_SOURCE_CHARACTERS}: give "
                "another with --chat-template"
            )
        self._setup = {"source": source, "variables": dict(variables), "special_texts": list(special_texts)}
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def render(self, conversation: Conversation) -> Rendered:
        """Render the text of a conversation and find its learned parts.

        Raises DataError, with the conversation's file and line, if the template refuses the conversation, takes more
        time, memory or text than any template needs, or does not reveal what the assistant wrote.
        """
        where, learned = conversation.where, conversation.learned
        question = {"messages": conversation.messages, "tools": conversation.tools, "asks": False}
        found = self._ask(question, f"{where}: {self.name} ")
        spans = tuple((begin, end) for begin, end in found["spans"])
        if not all(learned):
            if len(spans) != len(learned):  # spans cannot be matched with messages
                raise DataError(
                    f"{where}: a message has weight 0, but {self.name} marks {len(spans)} answers of {len(learned)}; "
                    "mark each once, or leave weight out"
                )
            spans = tuple(span for span, is_learned in zip(spans, learned, strict=True) if is_learned)
        return Rendered(where, found["text"], spans)

    def prompt(self, messages: tuple[Message, ...], where: str) -> str:
        """The text up to where the model answers. Raises the DataErrors of `render`, which begin with `where`."""
        question = {"messages": messages, "tools": None, "asks": True}
        text: str = self._ask(question, f"{where}: {self.name} ")["text"]
        return text

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

    def _start(self) -> subprocess.Popen[bytes]:
        program = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        command = python_command(program, str(Path(__file__).with_name("chat_render.py")))
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        weakref.finalize(self, process.kill)
        self._process = process
        self._ask(self._setup, f"{self.name}: ")
        return process

    def _ask(self, question: dict[str, Any], begin: str) -> dict[str, Any]:
        """The answer of the process. Raises DataError with a message that begins with `begin`; if the process has
        ended, the next call starts a new one."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        # ASCII without line breaks. Dates and decimals of tables become text, as a template would print them.
        limit_s = TIME_LIMIT_S + _MESSAGE_LIMIT_S * len(question.get("messages", ()))
        line = json.dumps({**question, "time_limit_s": limit_s}, default=str).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the process has ended, as the missing answer shows below
            process.stdin.write(line)
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            self._process, status = None, process.wait()
            why = f"ends the process that renders it (status {status})"
            if status == -signal.SIGPROF:
                why = f"takes more than {TIME_LIMIT_S:.0f} s of processor time"
            raise DataError(f"{begin}{why}; give another chat template")
        found: dict[str, Any] = json.loads(answer)
        if "refusal" in found:
            raise DataError(f"{begin}{found['refusal']}")
        return found


def load_chat_template(
    tokenizer: str | Path,
    special_texts: Sequence[str],
    given: str | Path | None = None,
    flag: str = "--tokenizer",
) -> ChatTemplate:
    """Load the template of a tokenizer's directory (or of the directory of a tokenizer.json), or the `given` template.

    Args:
        given: a name of CHAT_TEMPLATES, a Jinja file, or a directory; the variables still come from `tokenizer`.
        flag: the flag that gave `tokenizer`, for messages.

    Raises ConfigError if there is no template, and DataError for a template that cannot be read.
    """
    is_bytes = str(tokenizer) == ByteTokenizer.name  # the byte tokenizer has no folder
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config = {} if is_bytes else _read_config(folder)
    found: tuple[str | Path, str] | None
    if given is None:
        found = None if is_bytes else _find(folder, config)
    elif str(given) in CHAT_TEMPLATES:
        found = f"--chat-template {given}", CHAT_TEMPLATES[str(given)]
    elif Path(given).is_dir():
        found = _find(Path(given), _read_config(Path(given)))
    else:
        found = given, _read_text(Path(given))
    if found is None:
        what = f"{flag} {tokenizer} comes" if given is None else f"--chat-template {given} comes"
        raise ConfigError(
            f"{what} without a chat template (neither {TEMPLATE_FILE} nor chat_template in {_TOKENIZER_CONFIG}): give "
            f"--chat-template, {_ACCEPTED}"
        )
    name, source = found
    return ChatTemplate(source, variables=_tokens_in(config), special_texts=special_texts, name=name)


def load_run_template(config: RunConfig, special_texts: Sequence[str], given: str | None = None) -> ChatTemplate:
    """Load the chat template of a run: the `given` one, else the one that rendered its conversations, else the one of
    its pretrained model or tokenizer.

    Raises ConfigError if there is none, and the errors of `load_chat_template`.
    """
    words, pretrained = config.data.data_path, config.checkpoint.pretrained_checkpoint
    prefixes = () if words is None else read_blend("--data-path", words).prefixes
    learned = (f"{prefix}{TEMPLATE_SUFFIX}" for prefix in prefixes)
    found = given or next(filter(os.path.exists, learned), None)
    source = pretrained or config.data.tokenizer
    if source is None and found is None:
        raise ConfigError(
            "there is no chat template, as the run has learned no conversations and names no model: give "
            "--chat-template, a file of Jinja or the directory of a model that has one"
        )
    return load_chat_template(
        source or ByteTokenizer.name, special_texts, found, "--model" if pretrained else "--tokenizer"
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and so on, as the tokenizer_config.json of a folder spells them. Raises DataError."""
    return _tokens_in(_read_config(folder))


def _find(folder: Path, config: Mapping[str, Any]) -> tuple[str | Path, str] | None:
    """(name, source) of a folder's template, or None; the file takes precedence over the configuration, as in
    transformers."""
    if model_file(folder, TEMPLATE_FILE) is not None:
        return folder / TEMPLATE_FILE, _read_text(folder / TEMPLATE_FILE)
    name = f"chat_template in {folder / _TOKENIZER_CONFIG}"
    value = config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[-1].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise DataError(f"{name} is no text; repair it, or give --chat-template")
    return None if value is None else (name, value)


def _read_config(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if there is no such file."""
    path = model_file(folder, _TOKENIZER_CONFIG)
    source = Source(str(folder / _TOKENIZER_CONFIG), DataError, "download it again")
    return {} if path is None else read_json_object(path, source)


def _read_text(path: Path) -> str:
    source = Source(f"--chat-template {path}", ConfigError, f"give {_ACCEPTED}")
    return read_text(path, source, max_bytes=4 * MAX_SOURCE_CHARACTERS)


def _tokens_in(config: Mapping[str, Any]) -> dict[str, str]:
    """{name: text} of the special tokens in tokenizer_config.json, where each is a text or an object with a text."""
    values = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}
