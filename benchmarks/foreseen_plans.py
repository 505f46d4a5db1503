"""Asks `memo plan` every question whose answer the README or the guide quotes.

    python benchmarks/foreseen_plans.py [--only NAME ...]

Each question is the command line on the page. Its answer is kept as a row, pictures of plans are drawn, and then all
pages are written from the rows, as by `python benchmarks/report.py`. With --only a row replaces the earlier row of its
name, and pictures are not drawn. All answers are predictions that no GPU has confirmed. They take some four minutes of
one core, two of them for the largest models.

Questions about a single GPU state its host memory, because the GPU may be part of a node or a machine of its own.
"""

import argparse
import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import report
import rows

from memo.cli.main import main as memo

FILE = "foreseen_plans"
_LLAMA = "--model llama-3.1-8b"
_ONE_H100 = f"{_LLAMA} --gpus 1 --hardware h100-80"
_EIGHT_H100 = f"{_LLAMA} --gpus 8 --hardware h100-80"
_SMALL = f"{_LLAMA} --gpus 1 --hardware a100-40 --gpu-memory-gib 24"
_LONGEST = "--objective max-seq-len"
_LARGEST = "--objective max-model-size --seq-len 4096"

QUESTIONS = {
    # name: arguments of `memo plan`
    "h100x8_512k": f"{_EIGHT_H100} --seq-len 512K --gbs 8",
    "h100x8_512k_512gib": f"{_EIGHT_H100} --seq-len 512K --gbs 8 --host-memory-gib 512",
    "h100x8_1m": f"{_EIGHT_H100} --seq-len 1M --gbs 8 --top 3",
    "h200x8_512k": f"{_LLAMA} --gpus 8 --hardware h200 --seq-len 512K --gbs 8",
    "h200x8_1m": f"{_LLAMA} --gpus 8 --hardware h200 --seq-len 1M --gbs 8",
    "b200x8_1m": f"{_LLAMA} --gpus 8 --hardware b200 --seq-len 1M --gbs 8",
    "h100x1_1m": f"{_ONE_H100} --host-memory-gib 1536 --seq-len 1M --gbs 1",
    "24gib_128k": f"{_SMALL} --host-memory-gib 512 --seq-len 128K --gbs 1",
    "custom_512k": f"{_EIGHT_H100} --seq-len 512K --gbs 8 --custom-layer examples/custom_model.py:ParallelLayer",
    "h100x8_8m_disk": f"{_EIGHT_H100} --seq-len 8M --gbs 1 --nvme-gib 3725 --nvme-gb-per-s 2",
    "h100x1_1m_disk": f"{_ONE_H100} --host-memory-gib 256 --seq-len 1M --gbs 1 --nvme-gib 931 --nvme-gb-per-s 2",
    "24gib_128k_disk": f"{_SMALL} --host-memory-gib 128 --seq-len 128K --gbs 1 --nvme-gib 931 --nvme-gb-per-s 2"
    " --clip-grad 0",
    "h100x8_longest": f"{_EIGHT_H100} {_LONGEST}",
    "h100x8_longest_alst": f"{_EIGHT_H100} --host-memory-gib 1770 {_LONGEST}",  # 1.9 TB
    "h100x16_longest": f"{_LLAMA} --gpus 16 --hardware h100-80 {_LONGEST}",
    "h100x64_longest": f"{_LLAMA} --gpus 64 --hardware h100-80 {_LONGEST}",
    "h100x1_longest": f"{_ONE_H100} --host-memory-gib 1024 {_LONGEST}",
    "h100x1_longest_256gib": f"{_ONE_H100} --host-memory-gib 256 {_LONGEST}",
    "24gib_longest": f"{_SMALL} --host-memory-gib 256 {_LONGEST}",
    "a800x8_longest": f"--model gpt-7b --gpus 8 --hardware a800-80 {_LONGEST}",
    "h100x8_longest_disk": f"{_EIGHT_H100} --gbs 1 --nvme-gib 7451 --nvme-gb-per-s 2 {_LONGEST}",
    "h100x1_longest_disk": f"{_ONE_H100} --host-memory-gib 1024 --nvme-gib 3725 --nvme-gb-per-s 2 {_LONGEST}",
    "24gib_longest_1tib": f"{_SMALL} --host-memory-gib 1024 {_LONGEST}",
    "h100x8_longest_at_1000": f"{_EIGHT_H100} {_LONGEST} --min-tgs 1000",
    "a100x8_largest_gpt": f"--family gpt --gpus 8 --hardware a100-80 {_LARGEST}",
    "a100x8_largest_llama": f"--family llama --gpus 8 --hardware a100-80 {_LARGEST}",
    "h200x1_largest_gpt": f"--family gpt --gpus 1 --hardware h200 --host-memory-gib 128 {_LARGEST}",
    "h200x1_largest_llama": f"--family llama --gpus 1 --hardware h200 --host-memory-gib 128 {_LARGEST}",
}
PICTURES = {
    # file of docs/images: arguments of `memo plan --plot`
    "plan.svg": "--model gpt-7b --gpus 8 --seq-len 524288 --gbs 16",
    "one_million_tokens.svg": f"{_EIGHT_H100} --seq-len 1M --gbs 8",
}
RANKED = ("h100x8_1m",)
"""Questions for which a page shows more than the best choice: the printed table, and its first layouts."""
SHOWN = 3
_MACHINE = (
    *("model", "gpus", "hardware", "gpu_memory_gib", "host_memory_gib", "nvme_gib", "nvme_gb_per_s"),
    *("seq_len", "global_batch_size", "longest", "largest"),
)


def ask(name: str) -> dict[str, Any]:
    """Return the row of a question: its arguments, the machine, and the best choices of `memo plan --json`."""
    arguments = shlex.split(QUESTIONS[name])
    answer = json.loads(_printed([*arguments, "--json"]))
    if not answer["choices"]:
        raise SystemExit(f"memo plan {QUESTIONS[name]}: nothing fits, so no page can quote it")
    row = {"name": name, "arguments": QUESTIONS[name], **{field: answer[field] for field in _MACHINE}}
    if name not in RANKED:
        return {**row, "choices": answer["choices"][:1]}
    return {**row, "choices": answer["choices"][:SHOWN], "printed": _printed(arguments)}


def draw(picture: str, path: Path) -> None:
    """Draw a picture of the guide by `memo plan --plot`."""
    _printed([*shlex.split(PICTURES[picture]), "--plot", str(path)])


def _printed(arguments: list[str]) -> str:
    """Return the output of `memo plan`, run in this process from the root of the repository."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(rows.ROOT):
        memo(["plan", *arguments])
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, metavar="NAME", help="names of questions")
    only = parser.parse_args().only
    journal = rows.Journal(FILE)
    for name in only or QUESTIONS:
        if only:
            journal.replace(ask(name), "name")
        else:
            journal.add(ask(name))
    for picture in PICTURES if not only else ():
        draw(picture, rows.ROOT / "docs" / "images" / picture)
    for page in report.write():
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
