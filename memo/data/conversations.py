"""Instruction data: conversations from .jsonl files, in the three forms that users have.

    messages      {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    instruction   {"instruction": "Translate.", "input": "Haus", "output": "house"}      input may be left out
    prompt        {"prompt": "2 + 2 =", "completion": "4"}

The first is OpenAI's and may also hold "tools", and "weight": 0 in a message of the assistant that is not to be
learned. The second is Alpaca's. The last two become a message of the user and one of the assistant, after one of the
system if the line has a text under "system".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memo.artifacts.reading import listed
from memo.data.documents import read_json_lines
from memo.errors import DataError

ASSISTANT = "assistant"
"""The role whose messages are learned."""

Message = dict[str, Any]
"""`role`, `content` and whatever else the chat template of the model reads; no value is None."""


@dataclass(frozen=True)
class Conversation:
    """What one line holds.

    Attributes:
        where: file and line, for messages about it.
        messages: at least one of the assistant.
        learned: for each message of the assistant, in turn, whether it is learned; at least one is.
        tools: JSON schemas of functions, for the chat template.
    """

    where: str
    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: list[Any] | None = None


def read_conversations(files: Sequence[Path]) -> Iterator[Conversation]:
    """A conversation for each line. Raises DataError that names the file, the line and the field."""
    for path in files:
        for where, record in read_json_lines(path):
            yield _conversation(record, where)


def _conversation(record: Any, where: str) -> Conversation:
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {_kind(record)} where a conversation should be; give a JSON object")
    if "messages" in record:
        messages = _messages(record["messages"], where)
    elif "instruction" in record:
        question = _text(record, "instruction", where)
        context = _text(record, "input", where) if record.get("input") is not None else ""
        messages = _turn(record, f"{question}\n\n{context}" if context else question, "output", where)
    elif "prompt" in record:
        messages = _turn(record, _text(record, "prompt", where), "completion", where)
    else:
        raise DataError(
            f"{where}: no conversation, found the fields [{listed(sorted(record))}]; give messages, or instruction and "
            "output, or prompt and completion"
        )
    learned = tuple(_is_learned(message, f"{where}: messages[{i}]") for i, message in _answers(messages))
    if not any(learned):
        raise DataError(f"{where}: no message of the role {ASSISTANT} to learn from; add one or remove the line")
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools is {_kind(tools)}; give a list of functions")
    plain = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return Conversation(where, plain, learned, tools)


def _turn(record: dict[str, Any], question: str, answer_field: str, where: str) -> list[Message]:
    """One question and its answer."""
    messages = [
        {"role": "user", "content": question},
        {"role": ASSISTANT, "content": _text(record, answer_field, where)},
    ]
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": _text(record, "system", where)})
    return messages


def _messages(given: Any, where: str) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: messages is {_kind(given)}; give a list of at least two")
    return [_message(message, f"{where}: messages[{i}]") for i, message in enumerate(given)]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"{where} is {_kind(given)}; give an object with role and content")
    # OpenAI writes content: null beside tool_calls; a template that meets null would render "None".
    message = {key: value for key, value in given.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where}.role is {_kind(given.get('role'))}; give a text such as user or {ASSISTANT}")
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part(p, f"{where}.content[{i}]") for i, p in enumerate(message["content"]))
    elif not isinstance(message.get("content"), str) and "tool_calls" not in message:
        raise DataError(f"{where}.content is {_kind(given.get('content'))}; give a text")
    return message


def _part(part: Any, where: str) -> str:
    """The text of one part of a message that comes in parts."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type", "an object without type") if isinstance(part, dict) else _kind(part)
        raise DataError(f'{where} is {kind}; memo trains on texts: give {{"type": "text", "text": ...}}')
    text: str = part["text"]
    return text


def _answers(messages: list[Message]) -> Iterator[tuple[int, Message]]:
    return ((i, message) for i, message in enumerate(messages) if message["role"] == ASSISTANT)


def _is_learned(message: Message, where: str) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{where}.weight is {weight!r}; give 0 or 1")
    return bool(weight)


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} is {_kind(value)}; give a text")
    return value


def _kind(value: Any) -> str:
    """What stands there instead, in JSON's words."""
    if value is None:
        return "missing or null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, str | dict):
        return "a text" if isinstance(value, str) else "an object"
    return f"the number {value!r}"
