"""What a model is asked in its chat template: the text of transformers, and the token that ends its answer."""

import json
from pathlib import Path

import pytest
from chats import CHATS, STYLES, template, write_chats, write_tokenizer

from memo.config import RunConfig
from memo.data import build_chat
from memo.data.chat_template import ChatTemplate
from memo.data.chat_templates import load_chat_template, load_run_template
from memo.data.tokenizer import load_tokenizer
from memo.errors import ConfigError, DataError

ENDS = {"chatml": "<|im_end|>", "headers": "<|eot|>", "inst": "</s>"}


def load(folder: Path) -> ChatTemplate:
    return load_chat_template(folder, load_tokenizer(folder).special_texts)


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_prompt_is_that_of_transformers(tmp_path: Path, style: str, marks: bool) -> None:
    """Also after earlier answers, whose marks are taken out."""
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / style, style, marks=marks)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    for chat in CHATS:
        for asked in (chat[:1], chat[:-1]):
            expected = theirs.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
            assert ours.prompt(tuple(asked), "here") == expected


@pytest.mark.parametrize("lists_added_tokens", [False, True])
def test_named_tokens_of_an_older_directory(tmp_path: Path, lists_added_tokens: bool) -> None:
    """transformers reads special_tokens_map.json only beside a configuration without a list of added tokens."""
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "headers", "headers", marks=False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": config.pop("bos_token")["content"]}))
    config |= {"added_tokens_decoder": {}} if lists_added_tokens else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(CHATS[0][:1], tokenize=False)
    assert expected.startswith("<|begin|>") != lists_added_tokens
    assert load(folder).prompt(tuple(CHATS[0][:1]), "here").startswith(expected)


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_the_token_that_ends_an_answer(tmp_path: Path, style: str, marks: bool) -> None:
    assert load(write_tokenizer(tmp_path / style, style, marks=marks)).end_of_answer() == ENDS[style]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",  # ends answers with a line
        "{{ raise_exception('no system message') }}",
    ],
)
def test_a_template_that_ends_answers_with_no_token(source: str) -> None:
    made = ChatTemplate(source, variables={}, special_texts=["<|im_end|>"], name="mine")
    assert made.end_of_answer() is None


def test_a_message_that_the_template_refuses_is_told_by_name(tmp_path: Path) -> None:
    made = load(write_tokenizer(tmp_path / "headers", "headers", marks=False))
    with pytest.raises(DataError, match=r"^the message: .* refuses the conversation \(no role wizard\)"):
        made.prompt(({"role": "wizard", "content": "hi"},), "the message")


def test_the_template_of_a_run(tmp_path: Path) -> None:
    """What rendered its conversations, else that of its model; a given one before both."""
    model = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    other = write_tokenizer(tmp_path / "other", "headers", marks=False)
    chats = write_chats(tmp_path / "chats.jsonl")
    build_chat([chats], tmp_path / "corpus", tokenizer=str(model), chat_template=other)
    config = RunConfig().override({"pretrained_checkpoint": str(model)})
    learned = config.override({"data_path": str(tmp_path / "corpus")})
    assert load_run_template(config, ()).source == template("chatml", marks=False)
    assert load_run_template(learned, ()).source == template("headers", marks=False)
    assert load_run_template(learned, (), str(model)).source == template("chatml", marks=False)
    alone = learned.override({"pretrained_checkpoint": None})
    assert load_run_template(alone, ()).source == template("headers", marks=False)
    with pytest.raises(ConfigError, match=r"the run has learned no conversations and names no model: give --chat-t"):
        load_run_template(RunConfig(), ())
    content = json.loads((model / "tokenizer_config.json").read_text())
    del content["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"--model .*/model comes without a chat template .*: give --chat-template"):
        load_run_template(config, ())
