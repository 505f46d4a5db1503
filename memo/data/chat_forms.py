"""The forms in which users have conversations, told by the fields of a record (memo.data.conversations reads them)."""

from collections.abc import Collection
from typing import Literal

ChatForm = Literal["messages", "conversations", "instruction", "prompt"]
FIELDS: dict[ChatForm, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
}
"""By which a record is known to have a form."""


def forms_of(fields: Collection[str]) -> list[ChatForm]:
    """The forms all of whose fields are among those of a record, or among the columns of a table."""
    return [form for form, needed in FIELDS.items() if set(needed) <= set(fields)]


def remedy_without_texts(fields: Collection[str], otherwise: str) -> str:
    """What to do about records that lack the key of texts; `otherwise` if they are no conversations."""
    if not forms_of(fields):
        return otherwise
    return "these are conversations, of which `memo data chat` makes a corpus"
