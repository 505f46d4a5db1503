"""Compares the speed of `memo data build` with that of `tokenizers` alone on all cores; the aim is 0.7 of its rate.

    python benchmarks/ingestion.py --mib 64

Texts are the sources of Python's standard library, repeated up to `--mib`, in lines of JSON; the tokenizer is a
byte-level BPE of 32,768 tokens that is trained on them. `tokenizers` encodes texts in memory and discards the
encodings: it neither reads nor parses a file, and it writes nothing. memo reads the file and writes a corpus. Hugging
Face's `datasets`, if it is installed, reads the file and maps the tokenizer over it in one process a core, as its
documentation shows. Each way runs `--repeats` times in turn, in a process of its own, and its shortest time counts,
because other processes only add to it. Run it on an idle machine.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rows

from memo.data.corpus_builder import Reading, build_corpus, python_sources, standard_library
from memo.data.tokenizer import load_tokenizer, train_bpe
from memo.units import MIB

AIM = 0.7
VOCABULARY = 32768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(WAYS[options.way](Path(options.folder))))
        return
    with tempfile.TemporaryDirectory() as folder:
        text_mib = prepare(Path(folder), options.mib)
        load = os.getloadavg()[0]  # before this script adds its own load; below 1 on an idle machine
        seconds = measure(Path(folder), options.repeats)
    reference = seconds["tokenizers"]
    found = [
        {
            "way": way,
            "text_mib": text_mib,
            "cores": len(os.sched_getaffinity(0)),
            "vocabulary": VOCABULARY,
            "seconds": best,
            "mib_per_s": text_mib / best,
            "ratio": reference / best,
            "load": load,
        }
        for way, best in seconds.items()
    ]
    for row in found:
        print(json.dumps(row))
    print(f"kept in {rows.write('ingestion', found)}")
    if reference / seconds["memo data build"] < AIM:
        raise SystemExit(f"memo data build has less than {AIM} of the rate of tokenizers")


def prepare(folder: Path, mib: float) -> float:
    """Write texts.jsonl and tokenizer.json; return MiB of text."""
    texts = [path.read_bytes().decode("utf-8", errors="replace") for path in python_sources(standard_library())]
    train_bpe(texts[:400], VOCABULARY, folder / "tokenizer.json")
    num_bytes = 0
    with (folder / "texts.jsonl").open("w") as file:
        while num_bytes < mib * MIB:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                num_bytes += len(text.encode())
                if num_bytes >= mib * MIB:
                    break
    return num_bytes / MIB


def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Return the seconds of the fastest run of each way."""
    ways = [way for way in WAYS if way != "datasets" or importlib.util.find_spec("datasets")]
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for way in ways:
            command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            best[way] = min(best[way], float(json.loads(answer.splitlines()[-1])))
    return best


def with_tokenizers(folder: Path) -> float:
    tokenizer: Any = load_tokenizer(folder / "tokenizer.json")
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    start_s = time.perf_counter()
    for first in range(0, len(texts), 1000):  # all at once would need the memory of all encodings
        tokenizer._tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False)
    return time.perf_counter() - start_s


def with_memo(folder: Path, workers: int = 0) -> float:
    start_s = time.perf_counter()
    build_corpus(
        [folder / "texts.jsonl"],
        folder / "corpus",
        tokenizer=str(folder / "tokenizer.json"),
        reading=Reading(workers=workers),
    )
    return time.perf_counter() - start_s


def with_datasets(folder: Path) -> float:
    import datasets
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        texts = datasets.load_dataset("json", data_files=str(folder / "texts.jsonl"), cache_dir=cache, split="train")
        texts.map(
            lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]},
            batched=True,
            remove_columns=["text"],
            num_proc=len(os.sched_getaffinity(0)),
        )
        return time.perf_counter() - start_s


WAYS = {
    "tokenizers": with_tokenizers,
    "memo data build": with_memo,
    "memo data build --workers 1": lambda folder: with_memo(folder, workers=1),
    "datasets": with_datasets,
}


if __name__ == "__main__":
    main()
