"""`memo data chat`: the tokens that transformers makes, and exactly the assistant's of them marked."""

import datetime
import decimal
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATS, STYLES, answers, template, write_chats, write_lines, write_tokenizer
from documents import read_conversations

from memo.cli.main import main
from memo.data import CorpusFacts, IndexedDataset, build_chat, load_corpus_tokenizer, load_tokenizer
from memo.data.chat_template import ChatTemplate
from memo.data.chat_templates import CHAT_TEMPLATES, load_chat_template
from memo.data.conversations import Conversation
from memo.data.encode import answer_mask
from memo.data.tokenizer import BPETokenizer, ByteTokenizer, Located
from memo.errors import CheckpointError, ConfigError, DataError

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def build(tmp_path: Path, style: str, *, marks: bool, chats: Path | None = None, **options: Any) -> Path:
    folder = write_tokenizer(tmp_path / f"{style}-{marks}", style, marks=marks, **options)
    prefix = tmp_path / f"{style}-{marks}-corpus"
    build_chat([chats or write_chats(tmp_path / "chats.jsonl")], prefix, tokenizer=str(folder))
    return prefix


def documents(prefix: Path) -> list[tuple[list[int], list[int]]]:
    tokens, mask = IndexedDataset(prefix), IndexedDataset(f"{prefix}.mask")
    assert len(tokens) == len(mask)
    return [(tokens[i].tolist(), mask[i].tolist()) for i in range(len(tokens))]


def learned_texts(prefix: Path) -> list[list[str]]:
    """The runs of marked tokens of each document, decoded with what ends them."""
    tokenizer = load_corpus_tokenizer(prefix)
    assert isinstance(tokenizer, BPETokenizer)
    found = []
    for ids, mask in documents(prefix):
        edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
        runs = [tokenizer._tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in edges]
        found.append(runs)
    return found


@pytest.mark.parametrize("style", STYLES)
def test_parity_with_transformers(tmp_path: Path, style: str) -> None:
    """Tokens and marks of apply_chat_template, from a template that marks answers itself and from one that does not."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / f"{style}-True", style, marks=True))
    expected = []
    for chat in CHATS:
        out = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        expected.append((list(out["input_ids"]), list(out["assistant_masks"])))
    assert any(0 < sum(mask) < len(mask) for _, mask in expected)
    assert documents(build(tmp_path, style, marks=True)) == expected
    assert documents(build(tmp_path, style, marks=False)) == expected


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_the_answers_and_nothing_else(tmp_path: Path, style: str, trim_offsets: bool) -> None:
    """Also with a tokenizer whose offsets leave out blanks, where transformers loses an answer that begins with one."""
    prefix = build(tmp_path, style, marks=False, trim_offsets=trim_offsets)
    assert learned_texts(prefix) == [answers(style, chat) for chat in CHATS]


def test_dates_and_decimals_of_a_table_are_text(tmp_path: Path) -> None:
    """A message of a table may have further columns, whose values are no JSON."""
    said_at, price = datetime.datetime(2026, 1, 31, 12), decimal.Decimal("1.50")
    question = {**QUESTION, "said_at": said_at, "price": price}
    chats = Conversation("t.parquet, row 1", (question, ANSWER), (True,))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.said_at }} {{ m.price }} "
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    folder = write_tokenizer(tmp_path / "tokenizer", "chatml", marks=True)
    rendered = load_chat_template(folder, (), tmp_path / "t.jinja").render(chats)
    assert "user 2026-01-31 12:00:00 1.50 q" in rendered.text


def test_three_forms_are_one(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Translate.\n\nHaus"}, {"role": "assistant", "content": "house"}]
    system = {"role": "system", "content": "s"}
    lines = [
        {"messages": chat},
        {"instruction": "Translate.", "input": "Haus", "output": "house", "source": "elsewhere"},
        {"instruction": "Translate.\n\nHaus", "input": "", "output": "house"},
        {"instruction": "Translate.\n\nHaus", "output": "house", "input": None},
        "",
        {"prompt": "Translate.\n\nHaus", "completion": "house"},
        {"messages": [{**chat[0], "content": [{"type": "text", "text": "Translate.\n\n"}] * 1}, chat[1]]},
        {"messages": [system, *chat], "tools": None},
        {"prompt": "Translate.\n\nHaus", "completion": "house", "system": "s"},
    ]
    lines[6]["messages"][0]["content"].append({"type": "text", "text": "Haus"})
    read = list(read_conversations([write_lines(tmp_path / "in.jsonl", lines)]))
    assert [list(c.messages) for c in read[:6]] == [chat] * 6
    assert [list(c.messages) for c in read[6:]] == [[system, *chat]] * 2
    assert [c.where[-6:] for c in read] == [f"line {i}" for i in (1, 2, 3, 4, 6, 7, 8, 9)]


def test_what_other_trainers_write_beside_the_forms(tmp_path: Path) -> None:
    """TRL's messages of a prompt, which are not learned, and LLaMA-Factory's history, which is. Tables have tools as
    text, because a column has one type."""
    prompt, said = [QUESTION, {**ANSWER, "content": "first"}, QUESTION], [{**ANSWER, "content": "second"}]
    record = {"prompt": prompt, "completion": said, "tools": '[{"n": 1}]'}
    lines = write_lines(tmp_path / "in.jsonl", [record])
    (conversation,) = read_conversations([lines])
    assert (list(conversation.messages), conversation.learned) == ([*prompt, *said], (False, True))
    assert conversation.variables == {"tools": [{"n": 1}]}
    alpaca = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"}
    (conversation,) = read_conversations([write_lines(tmp_path / "history.jsonl", [alpaca])])
    assert [message["content"] for message in conversation.messages] == ["s", "a", "b", "c", "d"]
    assert conversation.learned == (True, True)
    for wrong, told in (
        ({**alpaca, "history": [["a"]], "prompt": None}, "history is a list of 1; give a list of pairs"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs is a list of 1; give an object"),
        ({"tools": "[{"}, r"line 1: tools: is not JSON .*: give a list of functions"),
        ({"completion": "4"}, "line 1: completion is '4'; give a list of messages"),
        ({"label": False}, "label is false"),
    ):
        with pytest.raises(DataError, match=told):
            list(read_conversations([write_lines(tmp_path / "wrong.jsonl", [{**record, **wrong}])]))


def test_weight_zero_is_not_learned(tmp_path: Path) -> None:
    chat = [QUESTION, {**ANSWER, "content": "first", "weight": 0}, QUESTION, {**ANSWER, "content": "second"}]
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": chat}])
    for marks in (False, True):
        assert learned_texts(build(tmp_path, "chatml", marks=marks, chats=lines)) == [["second<|im_end|>"]]
    marks_one = template("chatml", marks=False).replace(
        "{{ m['content'] + '<|im_end|>' }}{{ '\\n' }}", "{{ m.content }}"
    )
    marks_one += "{% generation %}x{% endgeneration %}"
    (tmp_path / "one.jinja").write_text(marks_one)
    with pytest.raises(
        DataError, match=r"in.jsonl, line 1: a message has weight 0, but .*one.jinja marks 1 answers of 2"
    ):
        build_chat(
            [lines], tmp_path / "o", tokenizer=str(tmp_path / "chatml-True"), chat_template=tmp_path / "one.jinja"
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"messages": [{**QUESTION, "role": "tutor"}, ANSWER]},
            r"line 2: .* refuses the conversation \(no role tutor\)",
        ),
        ({"messages": [ANSWER, QUESTION, {**ANSWER, "content": "\ufdd0"}]}, r"line 2: .* marks answers with U\+FDD0"),
    ],
)
def test_conversations_that_a_template_refuses(tmp_path: Path, line: Any, message: str) -> None:
    """tests/cli/refusals.txt has those that are none."""
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": [QUESTION, ANSWER]}, line])
    with pytest.raises(DataError, match=message):
        build(tmp_path, "headers", marks=True, chats=lines)
    assert not list(tmp_path.glob("*corpus*"))


def test_a_template_that_rewrites_earlier_answers_needs_marks(tmp_path: Path) -> None:
    """As those of reasoning models do, which drop thoughts from all answers but the last."""
    first = ("{{ m['content'] +", "{{ ('' if loop.last else '~') + m['content'] +", 1)  # which is the assistant's
    plain, tagged = (template("chatml", marks=marks).replace(*first) for marks in (False, True))
    folder = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    (folder / "chat_template.jinja").write_text(plain)  # comes before tokenizer_config.json
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": [QUESTION, ANSWER]}])
    build_chat([lines], tmp_path / "one", tokenizer=str(folder))
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": CHATS[0]}, {"messages": CHATS[2]}])
    message = r"in.jsonl, line 2: .*chat_template.jinja writes messages\[1\] in another way .*\{% generation %\}"
    with pytest.raises(DataError, match=message):
        build_chat([lines], tmp_path / "two", tokenizer=str(folder))
    first_question, first_answer, *rest = CHATS[2]  # an answer that is not learned may be changed
    unlearned = [{"messages": [first_question, {**first_answer, "weight": 0}, *rest]}]
    build_chat([write_lines(tmp_path / "last.jsonl", unlearned)], tmp_path / "last", tokenizer=str(folder))
    assert learned_texts(tmp_path / "last") == [["7 * 6 = 42<|im_end|>"]]
    (tmp_path / "tagged.jinja").write_text(tagged)
    build_chat([lines], tmp_path / "two", tokenizer=str(folder), chat_template=tmp_path / "tagged.jinja")
    assert learned_texts(tmp_path / "two")[1] == ["~assistant<|im_end|>", "7 * 6 = 42<|im_end|>"]
    assert (tmp_path / "two-chat_template.jinja").read_text() == tagged


def test_what_a_template_may_use(tmp_path: Path) -> None:
    """tools as JSON that keeps <, the date, break, lines of blocks that leave nothing."""
    source = (
        "  {% if true %}\n{% endif %}\n"
        "{{ tools | tojson }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}|{{ eos_token }}|{% generation %}{{ messages[1].tool_calls[0].name }}"
        "{% endgeneration %}"
    )
    (tmp_path / "t.jinja").write_text(source)
    folder = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    chat = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    line = {"messages": chat, "tools": [{"n": "<é>"}]}
    (conversation,) = read_conversations([write_lines(tmp_path / "in.jsonl", [line])])
    rendered = load_chat_template(folder, (), tmp_path / "t.jinja").render(conversation)
    assert rendered.text == '[{"n": "<é>"}]4|<|im_end|>|f'
    assert rendered.spans == ((len(rendered.text) - 1, len(rendered.text)),)


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", "inst", marks=False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(folder / "tokenizer.json", ()).source == "d"
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"--tokenizer .*model comes without a chat template .* give --chat-template"):
        load_chat_template(folder, ())
    other = write_tokenizer(tmp_path / "other", "chatml", marks=False)
    assert load_chat_template(folder, (), other).source == template("chatml", marks=False)
    with pytest.raises(ConfigError, match=r"--chat-template .*model comes without a chat template"):
        load_chat_template(folder, (), folder)
    with pytest.raises(
        ConfigError, match=r"--chat-template none.jinja: the file does not exist: give one of chatml, lla"
    ):
        load_chat_template(folder, (), "none.jinja")
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match=r"bad.jinja: no valid chat template"):
        load_chat_template(folder, (), tmp_path / "bad.jinja")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json: is not JSON"):
        load_chat_template(folder, ())


NAMED = {
    "chatml": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there!<|im_end|>\n",
        "Hello there!<|im_end|>",
    ),
    "llama3": (
        "<|begin|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello there!<|eot_id|>",
        "Hello there!<|eot_id|>",
    ),
    "plain": ("User: Hi\nAssistant: Hello there!<|eot|>\n", "Hello there!<|eot|>"),
}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_template_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text in transformers; an answer with its end is learned; what a form has no place for is refused."""
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "model", "headers", marks=False)
    special = ("<|im_end|>", "<|eot_id|>", "<|eot|>")
    template = load_chat_template(folder, special, name)
    read = list(read_conversations([write_chats(tmp_path / "chats.jsonl")]))
    theirs = AutoTokenizer.from_pretrained(folder)
    for conversation, chat in zip(read, CHATS, strict=True):
        rendered = template.render(conversation)
        assert rendered.text == theirs.apply_chat_template(chat, chat_template=CHAT_TEMPLATES[name], tokenize=False)
        assert len(rendered.spans) == sum(message["role"] == "assistant" for message in chat)
    rendered, (text, learned) = template.render(read[0]), NAMED[name]
    assert (rendered.text, [rendered.text[begin:end] for begin, end in rendered.spans]) == (text, [learned])
    calls = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    for lines in ({"messages": [QUESTION, ANSWER], "tools": [{"n": 1}]}, {"messages": [QUESTION, calls]}):
        (conversation,) = read_conversations([write_lines(tmp_path / "tools.jsonl", [lines])])
        with pytest.raises(
            DataError, match=rf"--chat-template {name} refuses the conversation \(it has no place for t"
        ):
            template.render(conversation)
    monkeypatch.chdir(tmp_path)
    summary = build_chat([tmp_path / "chats.jsonl"], "bytes", tokenizer="byte", chat_template=name)
    assert summary.train.num_documents == len(CHATS)


def test_a_record_has_variables_for_its_template(tmp_path: Path) -> None:
    """As objects or as their JSON; they stand before those of the tokenizer, but no message is replaced."""
    source = "{{ thinks }}{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, variables={"eos_token": "E"}, special_texts=(), name="x")
    given = {"thinks": "yes", "messages": [], "eos_token": "F"}
    lines = [
        {"messages": [QUESTION, ANSWER], "chat_template_kwargs": each} for each in (given, json.dumps(given), None)
    ]
    read = read_conversations([write_lines(tmp_path / "in.jsonl", lines)])
    texts = [template.render(conversation).text for conversation in read]
    said = QUESTION["content"] + ANSWER["content"]
    assert texts == [f"yesF{said}"] * 2 + [f"E{said}"]


def test_bytes_have_exact_offsets() -> None:
    text = "a🦙bé"
    (located,) = ByteTokenizer().encode_located([text])
    assert located.offsets.tolist() == [[0, 1], *[[1, 2]] * 4, [2, 3], *[[3, 4]] * 2]
    for begin in range(4):
        for end in range(begin, 5):
            chosen = located.ids[answer_mask(located, [(begin, end)]) == 1]
            assert ByteTokenizer().decode(chosen) == text[begin:end]


def test_a_token_has_the_blanks_before_it() -> None:
    """ "ab  cd " in tokens "ab", "  cd", " ", of which offsets leave out the blanks, and an emoji of two tokens."""
    located = Located(np.arange(5, dtype=np.int32), np.array([[0, 2], [4, 6], [7, 7], [7, 8], [7, 8]]))
    for span, mask in (
        ((0, 2), [1, 0, 0, 0, 0]),
        ((2, 4), [0, 1, 0, 0, 0]),  # two blanks
        ((6, 7), [0, 0, 1, 0, 0]),  # one blank, a token of its own
        ((7, 8), [0, 0, 0, 1, 1]),
        ((1, 3), [1, 1, 0, 0, 0]),  # parts of two tokens
    ):
        assert answer_mask(located, [span]).tolist() == mask, span
    assert answer_mask(located, [(0, 2), (7, 8)]).tolist() == [1, 0, 0, 1, 1]


def test_a_template_that_renders_no_answer(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": [QUESTION, ANSWER]}])
    for source in ("{{ messages[0].content }}{% if false %}{% generation %}x{% endgeneration %}{% endif %}", "same"):
        (tmp_path / "t.jinja").write_text(source)
        with pytest.raises(DataError, match=r"in.jsonl, line 1 has no token of an answer that counts; see what"):
            build_chat([lines], tmp_path / "o", tokenizer=str(folder), chat_template=tmp_path / "t.jinja")


def test_special_tokens_are_tokens_only_here(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "chatml", marks=False))
    (located,) = tokenizer.encode_located(["<|im_end|>"])
    assert len(located.ids) == 1 < len(tokenizer.encode("<|im_end|>"))
    assert "<|im_end|>" in tokenizer.special_texts


def test_a_bad_line_leaves_the_older_corpus(tmp_path: Path) -> None:
    prefix = build(tmp_path, "chatml", marks=False)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*corpus*")}
    assert sorted(before) == sorted(
        f"{prefix.name}{end}"
        for end in (".bin", ".idx", ".json", ".mask.bin", ".mask.idx", "-tokenizer.json", "-chat_template.jinja")
    )
    with pytest.raises(DataError, match="line 1"):
        build(tmp_path, "chatml", marks=False, chats=write_lines(tmp_path / "bad.jsonl", ["{"]))
    with pytest.raises(DataError, match=r"no documents for .*corpus; check the inputs"):
        build(tmp_path, "chatml", marks=False, chats=write_lines(tmp_path / "empty.jsonl", []))
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*corpus*")}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts count what is learned; a split is whole conversations; IN may be a directory."""
    folder = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(60)])
    (tmp_path / "in" / "readme.md").write_text("not data")
    prefix = tmp_path / "corpus"
    argv = ["data", "chat", str(tmp_path / "in"), str(prefix), "--tokenizer", str(folder)]
    assert main([*argv, "--eval-fraction", "0.2"]) == 0
    printed = capsys.readouterr().out
    facts = [CorpusFacts.load(prefix), CorpusFacts.load(f"{prefix}-eval")]
    assert facts[0].num_documents + facts[1].num_documents == 60
    assert f"{facts[0].num_documents} conversations" in printed and "of answers)" in printed
    for name, fact in zip((prefix, f"{prefix}-eval"), facts, strict=True):
        assert fact.num_answer_tokens == sum(sum(mask) for _, mask in documents(Path(name)))
        assert fact.num_tokens == sum(len(ids) for ids, _ in documents(Path(name)))


def test_a_template_that_is_a_link_to_the_outside(tmp_path: Path) -> None:
    """It would be copied beside the corpus."""
    folder = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    (tmp_path / "secret").write_text("{{ messages[0].content }}")
    (folder / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=r"model/chat_template.jinja is a link to .*/secret, outside of"):
        load_chat_template(folder, ())
    shutil.move(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to("../tokenizer.json")
    with pytest.raises(CheckpointError, match=r"model/tokenizer.json is a link to .*, outside of"):
        load_tokenizer(folder)


def test_sharegpt_is_openai_under_other_names(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, QUESTION, ANSWER, {"role": "tool", "content": "t"}, ANSWER]
    speakers = ("system", "human", "gpt", "function_response", "assistant")
    turns = [{"from": name, "value": message["content"]} for name, message in zip(speakers, chat, strict=True)]
    lines = [
        {"conversations": turns, "id": "x"},
        {"conversations": turns[1:], "system": "s"},
        {"conversations": chat},  # some call the list so and the fields as OpenAI does
        {"messages": turns},
        {"messages": chat, "prompt": "the first question again"},
        {"conversations": [*turns[:4], {**turns[4], "weight": 0}]},
    ]
    read = list(read_conversations([write_lines(tmp_path / "in.jsonl", lines)]))
    assert [list(each.messages) for each in read] == [chat] * 6
    assert [each.learned for each in read] == [(True, True)] * 5 + [(True, False)]


def test_the_form_can_be_named_and_what_cannot_be_read_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of records that have two forms; the third has not the one that is named, and the template refuses the fourth."""
    two = {"messages": [QUESTION, ANSWER], "prompt": "p", "completion": "c"}
    lines = write_lines(tmp_path / "in.jsonl", [two, two, {"messages": [QUESTION, ANSWER]}, {**two, "prompt": "bad"}])
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.role[0] }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    command = ["data", "chat", str(lines), str(tmp_path / "out"), "--tokenizer", "byte", "--skip-unreadable"]
    assert main([*command, "--chat-template", str(tmp_path / "t.jinja"), "--chat-form", "prompt"]) == 0
    told = capsys.readouterr().out
    assert "out: 2 conversations" in told and "left out 2 that could not be read:" in told
    assert "line 3: prompt is missing or null" in told and "in.jsonl, line 4: " in told
