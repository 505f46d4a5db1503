"""Reads instruction data: conversations as records of files, in the four common forms.

    messages       {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    conversations  {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
    instruction    {"instruction": "Translate.", "input": "Haus", "output": "house"}      input may be left out
    prompt         {"prompt": "2 + 2 =", "completion": "4"}      or lists of messages, of which completion is learned

"messages" is OpenAI's form. It may also have "weight": 0 in a message of the assistant that shall not be learned.
"conversations" is ShareGPT's form; its speakers get OpenAI's names. Any list may contain messages of the other form.
"instruction" is Alpaca's form. The texts of "instruction" and "prompt" become a message of the user and a message of
the assistant, after those of the pairs of texts under "history". In all forms but "messages", a text under "system"
becomes a first message of the system. The chat template gets the functions under "tools", and the variables under
"chat_template_kwargs", such as {"enable_thinking": false}, as in TRL.

A record's fields tell its form. A record with the fields of two forms is refused unless the form is named.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memo.artifacts.reading import Source, listed, parse_json, shown
from memo.errors import DataError

ASSISTANT = "assistant"
"""The role whose messages are learned."""

ChatForm = Literal["messages", "conversations", "instruction", "prompt"]
_FIELDS: dict[ChatForm, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
}
"""The fields by which the form of a record is recognised."""
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot"), ASSISTANT),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
}
"""Roles of ShareGPT's speakers."""

Message = dict[str, Any]
"""`role`, `content` and any other keys that the chat template reads; no value is None."""


@dataclass(frozen=True)
class Conversation:
    """The conversation of one record, and its file and line, for messages to users."""

    where: str
    messages: tuple[Message, ...]
    """At least one of them is by the assistant."""
    learned: tuple[bool, ...]
    """For each message of the assistant, in order, whether it is learned; at least one is."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template: `tools`, JSON schemas of functions, and others."""


def is_conversation(fields: Collection[str]) -> bool:
    """Whether a record with these fields has one of the forms."""
    return any(set(needed) <= set(fields) for needed in _FIELDS.values())


def conversation_of(record: Any, where: str, form: ChatForm | None = None) -> Conversation:
    """The conversation of a record; `form`: the form of all records, or None: the form that the record's fields tell.

    Raises DataError, which names the record by `where` and the field.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {kind_of(record)} where a conversation should be; give a JSON object")
    form = form or _form(record, where)
    if form not in ("messages", "conversations") and record.get("label") is False:  # as in data for KTO
        raise DataError(f"{where}: label is false, so the answer is not to be learned; remove the line")
    if form in ("messages", "conversations"):
        messages = read_messages(record.get(form), form, where)
    elif form == "prompt" and isinstance(record.get("prompt"), list):
        prompt, completion = (read_messages(record.get(field), field, where) for field in _FIELDS[form])
        messages = [*({**message, "weight": 0} for message in prompt), *completion]
    else:
        question, answer = (_text(record, field, where) for field in _FIELDS[form])
        if form == "instruction" and record.get("input") is not None:
            question = "\n\n".join(filter(None, (question, _text(record, "input", where))))
        turns = [*_history(record, where), (question, answer)]
        roles = ("user", ASSISTANT)
        messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    if form != "messages" and record.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(record, "system", where)})
    weights = [message.pop("weight", 1) for message in messages]
    for i, weight in enumerate(weights):
        if weight not in (0, 1):
            raise DataError(f"{where}: messages[{i}].weight is {weight!r}; give 0 or 1")
    answers = zip(messages, weights, strict=True)
    learned = tuple(bool(weight) for message, weight in answers if message["role"] == ASSISTANT)
    if not any(learned):
        raise DataError(f"{where}: no message of the role {ASSISTANT} to learn from; add one or remove the line")
    return Conversation(where, tuple(messages), learned, read_variables(record, where))


def _form(record: dict[str, Any], where: str) -> ChatForm:
    """The only form whose fields a record has."""
    there = {name for name, value in record.items() if value is not None}
    found = [form for form, needed in _FIELDS.items() if set(needed) <= there]
    if len(found) > 1:
        fields = " and ".join("+".join(_FIELDS[form]) for form in found)
        raise DataError(
            f"{where}: it may be read in {len(found)} ways, as it has {fields}; say which with --chat-form "
            f"{' or --chat-form '.join(found)}"
        )
    if not found and {"chosen", "rejected"} <= there:
        raise DataError(
            f"{where}: it has chosen and rejected, which are preferences: read them with `memo data pairs`, or with "
            "--preference dpo"
        )
    # No form is complete. The reader of the form whose first field exists will say which field is missing or empty.
    found += [form for form, needed in _FIELDS.items() if needed[0] in record]
    if not found:
        raise DataError(
            f"{where}: no conversation, found the fields [{listed(sorted(record))}]; give messages, or conversations, "
            "or instruction and output, or prompt and completion"
        )
    return found[0]


def read_variables(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The variables of a record for the chat template. Raises DataError."""
    tools = _parsed(record, "tools", list, "a list of functions", where)
    return {**_parsed(record, "chat_template_kwargs", dict, "an object", where), **({"tools": tools} if tools else {})}


def _parsed(record: dict[str, Any], name: str, kind: type, wanted: str, where: str) -> Any:
    """A field of this kind, empty if it is left out, or a text with its JSON, as in tables, whose columns have one
    type."""
    value = record.get(name)
    if isinstance(value, str):
        value = parse_json(value, Source(f"{where}: {name}", DataError, f"give {wanted}"))
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{where}: {name} is {kind_of(value)}; give {wanted}")
    return value or kind()


def read_messages(given: Any, field: str, where: str) -> list[Message]:
    """The messages of a list that a record has under `field`. Raises DataError."""
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: {field} is {kind_of(given)}; give a list of messages")
    return [_message(message, f"{where}: {field}[{i}]") for i, message in enumerate(given)]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"{where} is {kind_of(given)}; give an object with role and content, or from and value")
    # OpenAI writes content: null next to tool_calls; a template would render null as "None".
    message = {key: value for key, value in given.items() if value is not None}
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        if not isinstance(speaker, str) or speaker.lower() not in _SPEAKERS:
            raise DataError(f"{where}.from is {kind_of(speaker)}; give one of {', '.join(_SPEAKERS)}")
        said = {"content": message.pop("value")} if "value" in message else {}
        message |= {"role": _SPEAKERS[speaker.lower()], **said}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where}.role is {kind_of(message.get('role'))}; give a text such as user or {ASSISTANT}")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str) and "tool_calls" not in message:
        raise DataError(f"{where}.content is {kind_of(content)}; give a text")
    return message


def _part(part: Any, where: str) -> str:
    """The text of one part of a message that comes in parts."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type", "an object without type") if isinstance(part, dict) else kind_of(part)
        raise DataError(f'{where} is {kind}; memo trains on texts: give {{"type": "text", "text": ...}}')
    text: str = part["text"]
    return text


def _history(record: dict[str, Any], where: str) -> list[list[str]]:
    """Earlier questions and answers under "history", as in LLaMA-Factory's form of Alpaca's data."""
    turns = record.get("history") or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and [type(text) for text in turn] == [str, str] for turn in turns
    ):
        raise DataError(
            f"{where}: history is {kind_of(turns)}; give a list of pairs of texts, a question and its answer"
        )
    return turns


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} is {kind_of(value)}; give a text")
    return value


def kind_of(value: Any) -> str:
    """Words for an unexpected value."""
    return "missing or null" if value is None else shown(value)
