"""Chat templates that want all time or all memory, or raise what Python can raise: one message each, and soon."""

from pathlib import Path

import pytest
from chats import SPECIAL, template

from memo.data import chat_template
from memo.data.chat_template import ChatTemplate
from memo.data.conversations import Conversation
from memo.errors import DataError

MESSAGES = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
CHAT = Conversation("in.jsonl, line 7", MESSAGES, (True,))

TIME, MEMORY = r"takes more than 1 s of processor time", r"needs more than 51\d MiB of memory"
LOOPS = "{% for a in range(99999) %}" * 3 + "{{ a and '' }}" + "{% endfor %}" * 3
ATTACKS = {
    "division": (
        "{{ 1 / 0 }}",
        r"refuses the conversation \(ZeroDivisionError: division by zero\); repair the line, or",
    ),
    "long range": ("{% for i in range(10**9) %}x{% endfor %}", r"OverflowError: Range too big"),
    "loops": (LOOPS, TIME),
    "endless macro": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    "long text": ("{{ messages[0].content * 10**11 }}", MEMORY),
    "long constant": ("{{ 'a' * 10**11 }}", MEMORY),
    "text that doubles": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        MEMORY,
    ),
    "format": ("{{ '%1000000000d' | format(1) }}", MEMORY),
    "indent": ("{{ ('a\n' * 10**6) | indent(10**6) }}", MEMORY),
    "JSON": ("{{ messages | tojson(indent=10**10) }}", f"{MEMORY}|OverflowError"),
    "endless text": ("{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}", MEMORY),
    "attribute": ("{{ messages.__class__.__mro__ }}", "refuses the conversation"),
    "what is not there": ("{{ messages[9].role.x }}", "refuses the conversation"),
    "another role": ("{{ messages[0].update(role='x') }}", "refuses the conversation"),
    "words of its own": ("{{ raise_exception('no\nno ' * 10000) }}", r"refuses the conversation \(no no no"),
    "nothing": ("{{ raise_exception(None) }}", r"\(TemplateError: None\)|\(None\)"),
    "another template": ("{% include 'x' %}", "refuses the conversation"),
    "deep expression": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"no valid chat template \(RecursionError"),
    "deep blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, r"no valid chat template"),
    "no Jinja": ("{% for %}", r"no valid chat template"),
}


def rendered(source: str) -> str:
    made = ChatTemplate(source, variables={}, special_texts=SPECIAL, name="t.jinja")
    return made.render(CHAT).text


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused_by_name(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, told = ATTACKS[attack]
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 1.0)
    with pytest.raises(DataError, match=told) as caught:
        rendered(source)
    assert str(caught.value).startswith(("in.jsonl, line 7: t.jinja ", "t.jinja: "))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_conversations_after_an_attack_are_rendered_as_before() -> None:
    source = "{% if messages[0].content == 'bomb' %}{{ 'a' * 10**11 }}{% endif %}" + template("chatml", marks=True)
    made = ChatTemplate(source, variables={}, special_texts=SPECIAL, name="t.jinja")
    before = made.render(CHAT)
    bomb = Conversation("in.jsonl, line 8", ({"role": "user", "content": "bomb"}, MESSAGES[1]), (True,))
    with pytest.raises(DataError, match=r"^in.jsonl, line 8: t.jinja needs more than 51\d MiB of memory; give another"):
        made.render(bomb)
    assert made.render(CHAT) == before
    assert before.text[slice(*before.spans[0])] == "a<|im_end|>"


def test_long_conversations_have_room(tmp_path: Path) -> None:
    """A million characters, and a thousand turns, each of which is rendered twice to find the answers."""
    made = ChatTemplate(template("chatml", marks=False), variables={}, special_texts=SPECIAL, name="t.jinja")
    long = ({"role": "user", "content": "\U0001f999" * 500_000}, {"role": "assistant", "content": "b" * 500_000})
    found = made.render(Conversation("w", long, (True,)))
    assert len(found.text) > 10**6 and found.spans[0][1] - found.spans[0][0] == 500_000 + len("<|im_end|>")
    turns = MESSAGES * 200
    assert len(made.render(Conversation("w", turns, (True,) * 200)).spans) == 200
