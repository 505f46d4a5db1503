"""`memo data pairs`: TRL's forms of preferences, what counts of them, and the samples that hold them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATS, write_lines, write_tokenizer
from pairs import open_pairs, some_pairs, write_pairs

from memo.cli.main import main
from memo.config.data import DataConfig
from memo.data import IndexedDataset, PreferencePairs, build_pairs, load_tokenizer, open_corpus
from memo.data.facts import CorpusFacts
from memo.errors import ConfigError, DataError

USER, GOOD, BAD = (
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "five"},
)
BYTES = ["<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>\n", "five<|im_end|>\n"]
"""Bytes have no special token, so nothing ends an answer before its line does."""


def built(folder: Path, records: list[Any], **how: Any) -> list[tuple[str, str]]:
    """Text of each document, and of its tokens that count; end of document as a bar."""
    file = write_lines(folder / "pairs.jsonl", records)
    build_pairs([file], folder / "out", **{"tokenizer": "byte", **how})
    tokens, mask = IndexedDataset(folder / "out"), IndexedDataset(folder / "out.mask")
    tokenizer = load_tokenizer(how.get("tokenizer", "byte"))
    assert isinstance(open_corpus(folder / "out", DataConfig(seq_length=256), 1), PreferencePairs)
    found = []
    for number in range(len(tokens)):
        ids, counts = tokens[number], mask[number].astype(bool)
        texts = (tokenizer.decode(part) + "|" * int((part == tokenizer.eod).sum()) for part in (ids, ids[counts]))
        found.append(tuple(texts))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Sky is", "chosen": " blue.", "rejected": " green."},
        {"chosen": "Sky is blue.", "rejected": "Sky is green."},
        {"prompt": None, "chosen": "Sky is blue.", "rejected": "Sky is green."},
    ],
)
def test_texts_count_behind_the_prompt_with_the_end_of_the_document(tmp_path: Path, record: dict[str, Any]) -> None:
    """As TRL: the blank before a word belongs to the answer where the prompt is what both begin with."""
    assert built(tmp_path, [record]) == [("Sky is blue.|", " blue.|"), ("Sky is green.|", " green.|")]
    facts = CorpusFacts.load(tmp_path / "out")
    assert (facts.num_pairs, facts.num_documents, facts.num_answer_tokens) == (1, 2, 15)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]},
    ],
)
def test_messages_are_rendered_and_what_the_assistant_writes_counts(tmp_path: Path, record: dict[str, Any]) -> None:
    prompt, good, bad = BYTES
    found = built(tmp_path, [record], chat_template="chatml")
    assert found == [(prompt + good, good), (prompt + bad, bad)]


def test_an_answer_in_the_prompt_does_not_count(tmp_path: Path) -> None:
    again = {"role": "user", "content": "again"}
    record = {"prompt": [USER, BAD, again], "chosen": [GOOD], "rejected": [BAD]}
    assert [counts for _, counts in built(tmp_path, [record], chat_template="chatml")] == BYTES[1:]


@pytest.mark.parametrize("style", ["chatml", "inst"])
def test_the_template_of_a_model_is_that_of_transformers(tmp_path: Path, style: str) -> None:
    """Tokens of the whole conversation, and its tail is what counts."""
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "model", style, marks=False)
    *prompt, answer = CHATS[1]
    other = {**answer, "content": "three"}
    record = {"prompt": prompt, "chosen": [answer], "rejected": [other]}
    built(tmp_path, [record], tokenizer=str(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokens, mask = IndexedDataset(tmp_path / "out"), IndexedDataset(tmp_path / "out.mask")
    for number, end in enumerate((answer, other)):
        wanted = theirs.apply_chat_template([*prompt, end], return_dict=False)
        assert tokens[number].tolist() == wanted
        begin = int(np.flatnonzero(mask[number])[0])
        ours = theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert ours == wanted[:begin]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ([1], "line 2: found .* where a pair should be; give a JSON object"),
        ({"prompt": "a", "chosen": "b"}, "line 2: prompt is 'a'.*, chosen is 'b'.*, rejected is missing or null; give"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "line 2: prompt is 'a'.*give chosen and rejected as texts"),
        ({"prompt": [USER], "chosen": "b", "rejected": "c"}, "line 2: prompt is .*give chosen and rejected as texts"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "line 2: rejected has no message of the role assistant behind"),
        (
            {"question": "a", "chosen": "b", "rejected": "c"},
            "line 2: prompt is missing.*no common beginning; give",
        ),
        ({"prompt": "", "chosen": "", "rejected": "x"}, "line 2: chosen has no token of an answer that counts; see"),
    ],
)
def test_records_that_are_no_pairs_are_refused_or_left_out(tmp_path: Path, record: Any, told: str) -> None:
    good = {"prompt": "Sky is", "chosen": " blue.", "rejected": " green."}
    file = write_lines(tmp_path / "pairs.jsonl", [good, record])
    with pytest.raises(DataError, match=f"{told}.*--skip-unreadable of `memo data` leaves out"):
        build_pairs([file], tmp_path / "out", tokenizer="byte", chat_template="chatml")
    flags = ["--tokenizer", "byte", "--chat-template", "chatml", "--skip-unreadable"]
    main(["data", "pairs", str(file), str(tmp_path / "out"), *flags])
    assert CorpusFacts.load(tmp_path / "out").num_pairs == 1


def test_a_part_is_held_out_by_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"prompt": f"{i}: ", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]
    file, out = write_lines(tmp_path / "pairs.jsonl", records), tmp_path / "out"
    main(["data", "pairs", str(file), str(out), "--tokenizer", "byte", "--eval-fraction", "0.2"])
    told, seen = capsys.readouterr().out, []
    assert "answers in pairs" in told and f"memo train --data-path {out} --preference dpo" in told
    for prefix in (out, Path(f"{out}-eval")):
        tokens = IndexedDataset(prefix)
        assert CorpusFacts.load(prefix).num_pairs == len(tokens) // 2 > 0
        texts = [load_tokenizer("byte").decode(tokens[number]) for number in range(len(tokens))]
        for good, bad in zip(texts[::2], texts[1::2], strict=True):
            assert good.replace("good", "bad") == bad
        seen += texts
    assert len(set(seen)) == 80


@pytest.mark.parametrize("packing", [True, False])
def test_each_epoch_holds_every_pair_once(tmp_path: Path, packing: bool) -> None:
    """Chosen answers in even samples, rejected ones in the next, in the same order."""
    pairs = some_pairs(30, 90)
    data = open_pairs(write_pairs(tmp_path / "pairs", pairs, 90), 40, packing=packing)
    assert data.samples_per_epoch == 60 if not packing else data.samples_per_epoch < 40
    for epoch in range(2):
        seen = []
        for index in range(epoch * data.samples_per_epoch, (epoch + 1) * data.samples_per_epoch):
            sample, begin = data.sample(index), 0
            window = np.append(sample.tokens, sample.labels[-1])
            for pair in data.groups(index):
                ids, prompt = pairs[pair][index % 2]
                assert window[begin : begin + len(ids)].tolist() == ids.tolist()
                counts = sample.loss_mask[begin : begin + len(ids) - 1]
                assert counts.tolist() == [float(place >= prompt - 1) for place in range(len(ids) - 1)]
                assert data.where(index, begin).endswith(f"document {2 * pair + index % 2}, token 0")
                begin += len(ids)
            assert not sample.loss_mask[max(0, begin - 1) :].any() and "eod" in data.where(index, 41)
            seen += [(pair, index % 2) for pair in data.groups(index)]
        assert sorted(seen) == [(pair, side) for pair in range(30) for side in (0, 1)]
    assert [data.groups(i) for i in (0, 2, 4, 6)] != [data.groups(data.samples_per_epoch + i) for i in (0, 2, 4, 6)]


def test_long_answers_are_cut_or_their_pairs_left_out(tmp_path: Path) -> None:
    """Of windows of 9 tokens: the second pair's chosen answer is cut, of the third one nothing would be left."""

    def answer(prompt: int, length: int) -> tuple[Any, int]:
        return np.arange(prompt + length), prompt

    pairs = [(answer(2, 3), answer(2, 4)), (answer(2, 20), answer(2, 4)), (answer(12, 3), answer(2, 4))]
    prefix = write_pairs(tmp_path / "pairs", pairs, 90)
    data = open_pairs(prefix, 8)
    assert (data.num_kept, data.num_truncated, data.num_dropped) == (2, 1, 1)
    assert "1 cut at 9 tokens; 1 left out, too long" in data.describe()
    assert max(data.sample(index).loss_mask.sum() for index in range(4)) == 7
    assert open_pairs(prefix, 8, long_conversations="drop").num_kept == 1
    with pytest.raises(ConfigError, match=r"seq-length = 1 is too short for each of the 3 pairs of .*pairs; raise it"):
        open_pairs(prefix, 1)
