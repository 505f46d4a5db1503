"""ingestion.py: each way makes tokens of all texts, of which there are as many as it says."""

import json
from pathlib import Path

import ingestion as benchmark
import pytest

from memo.data import CorpusFacts
from memo.data.tokenizer import load_tokenizer
from memo.units import MIB


def test_ways_read_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "VOCABULARY", 300)
    monkeypatch.setattr(benchmark, "python_sources", lambda folder: sorted(Path(json.__file__).parent.glob("*.py")))
    text_mib = benchmark.prepare(tmp_path, 0.2)
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").open()]
    assert sum(len(text.encode()) for text in texts) == text_mib * MIB >= 0.2 * MIB
    assert benchmark.with_tokenizers(tmp_path) > 0 and benchmark.with_memo(tmp_path) > 0
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    expected = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    assert CorpusFacts.load(tmp_path / "corpus").num_tokens == expected
