"""Instruction data: conversations as records of files, in the four forms that users have.

    messages       {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    conversations  {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
    instruction    {"instruction": "Translate.", "input": "Haus", "output": "house"}      input may be left out
    prompt         {"prompt": "2 + 2 =", "completion": "4"}

The first is OpenAI's and may also hold "tools", and "weight": 0 in a message of the assistant that is not to be
learned. The second is ShareGPT's, whose speakers are named as the first names them; either list may hold messages of
the other's. The third is Alpaca's. The last two become a message of the user and one of the assistant. All but the
first come after a message of the system if the record has a text under "system".

Which form a record has is told by its fields, and a record that has those of two is refused unless the form is named.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memo.artifacts.reading import listed, shown
from memo.data.chat_forms import FIELDS, forms_of
from memo.data.chat_forms import ChatForm as ChatForm
from memo.data.left_out import Refuse, raise_it, read_each
from memo.data.records import RecordPiece, read_pieces
from memo.errors import DataError

ASSISTANT = "assistant"
"""The role whose messages are learned."""

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot"), ASSISTANT),
    **dict.fromkeys(("system", "tool"), ""),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
"""Roles of ShareGPT's speakers; an empty one is called the same."""

Message = dict[str, Any]
"""`role`, `content` and whatever else the chat template of the model reads; no value is None."""


@dataclass(frozen=True)
class Conversation:
    """The conversation of one record.

    Attributes:
        where: its file and line, for messages.
        messages: at least one of the assistant.
        learned: for each message of the assistant, in turn, whether it is learned; at least one is.
        tools: JSON schemas of functions, for the chat template.
    """

    where: str
    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: list[Any] | None = None


def read_conversations(files: Sequence[Path]) -> Iterator[Conversation]:
    """A conversation for each record of all files. Raises DataError for the first that cannot be read."""
    for piece in read_pieces(files, None, raise_it, lines_of_text=True):
        yield from conversations_of(piece)


def conversations_of(
    piece: RecordPiece, refuse: Refuse = raise_it, form: ChatForm | None = None
) -> Iterator[Conversation]:
    """A conversation for each record.

    Args:
        refuse: is given errors about records, which name the file, the line and the field.
        form: of all records; None: each has the one that its fields tell.
    """
    return read_each(piece.places, partial(_read, piece, form), refuse)


def _read(piece: RecordPiece, form: ChatForm | None, place: int) -> Conversation:
    record, where = piece.read(place), piece.where(place)
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {kind_of(record)} where a conversation should be; give a JSON object")
    if piece.unit == "row":  # a table has every column in every row
        record = without_nulls(record)
    form = form or _form(record, where)
    messages = _messages_of(record, form, where)
    if form != "messages" and record.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(record, "system", where)})
    return _conversation(record, messages, where)


def _form(record: Mapping[str, Any], where: str) -> ChatForm:
    """The only form whose fields a record has."""
    found = forms_of({name for name, value in record.items() if value is not None})
    if len(found) > 1:
        fields = " and ".join("+".join(FIELDS[form]) for form in found)
        raise DataError(
            f"{where}: it may be read in {len(found)} ways, as it has {fields}; say which with --chat-form "
            f"{' or --chat-form '.join(found)}"
        )
    if found:
        return found[0]
    for form, needed in FIELDS.items():  # the reader of that form then says which field is missing or empty
        if needed[0] in record:
            return form
    raise DataError(
        f"{where}: no conversation, found the fields [{listed(sorted(record))}]; give messages, or conversations, or "
        "instruction and output, or prompt and completion"
    )


def _messages_of(record: dict[str, Any], form: ChatForm, where: str) -> list[Message]:
    if form in ("messages", "conversations"):
        return read_messages(record.get(form), form, where)
    if form == "prompt":
        return _turn(record, _text(record, "prompt", where), "completion", where)
    question = _text(record, "instruction", where)
    context = _text(record, "input", where) if record.get("input") is not None else ""
    return _turn(record, f"{question}\n\n{context}" if context else question, "output", where)


def _conversation(record: dict[str, Any], messages: list[Message], where: str) -> Conversation:
    answers = [(i, message) for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    learned = tuple(_is_learned(message, f"{where}: messages[{i}]") for i, message in answers)
    if not any(learned):
        raise DataError(f"{where}: no message of the role {ASSISTANT} to learn from; add one or remove the line")
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools is {kind_of(tools)}; give a list of functions")
    plain = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return Conversation(where, plain, learned, tools)


def _turn(record: dict[str, Any], question: str, answer_field: str, where: str) -> list[Message]:
    """One question and its answer."""
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": _text(record, answer_field, where)}]


def read_messages(given: Any, field: str, where: str) -> list[Message]:
    """The messages of a list that a record has under `field`. Raises DataError."""
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: {field} is {kind_of(given)}; give a list of at least two")
    return [_message(message, f"{where}: {field}[{i}]") for i, message in enumerate(given)]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"{where} is {kind_of(given)}; give an object with role and content, or from and value")
    if "from" in given and "role" not in given:
        given = _in_roles(given, where)
    # OpenAI writes content: null beside tool_calls; a template that meets null would render "None".
    message = {key: value for key, value in given.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where}.role is {kind_of(given.get('role'))}; give a text such as user or {ASSISTANT}")
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part(p, f"{where}.content[{i}]") for i, p in enumerate(message["content"]))
    elif not isinstance(message.get("content"), str) and "tool_calls" not in message:
        raise DataError(f"{where}.content is {kind_of(given.get('content'))}; give a text")
    return message


def _in_roles(given: dict[str, Any], where: str) -> dict[str, Any]:
    """A message of ShareGPT's form in OpenAI's."""
    speaker = given["from"]
    if not isinstance(speaker, str) or speaker.lower() not in _SPEAKERS:
        raise DataError(f"{where}.from is {kind_of(speaker)}; give one of {', '.join(_SPEAKERS)}")
    rest = {key: value for key, value in given.items() if key not in ("from", "value")}
    return {**rest, "role": _SPEAKERS[speaker.lower()] or speaker.lower(), "content": given.get("value")}


def without_nulls(value: Any) -> Any:
    """A value without the fields that are null: a row of a table has a null for each field that only other rows use."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _part(part: Any, where: str) -> str:
    """The text of one part of a message that comes in parts."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type", "an object without type") if isinstance(part, dict) else kind_of(part)
        raise DataError(f'{where} is {kind}; memo trains on texts: give {{"type": "text", "text": ...}}')
    text: str = part["text"]
    return text


def _is_learned(message: Message, where: str) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{where}.weight is {weight!r}; give 0 or 1")
    return bool(weight)


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} is {kind_of(value)}; give a text")
    return value


def kind_of(value: Any) -> str:
    """A value that is not what it should be."""
    return "missing or null" if value is None else shown(value)
