"""Runs mutated command lines of all commands, with closed, full and broken standard streams.

    .venv/bin/python tests/support/command_campaign.py --lines 300 [--first 0]

Each line is a process of its own, in a folder of its own. A line fails if it prints a traceback, takes a minute, or
ends with a status that is neither 0, 2, 3 nor that of a broken pipe. A failure is printed with the seed of its line.
"""

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from processes import SMALL

from memo.cli.main import COMMANDS
from memo.errors import EXIT_FAILED, EXIT_OUTPUT, EXIT_REFUSED

LIMIT_S = 60.0
STREAMS = ("", ">&-", "2>&-", ">/dev/full", "2>/dev/full", "<&- >&- 2>&-", ">&- 2>/dev/full", "| head -c 1 >/dev/null")
SEEDS = (
    f"train {SMALL} --train-iters 1",
    f"profile {SMALL} --out profile.json",
    f"evaluate {SMALL} --load run --data-path d",
    "generate --load run --prompt hello --draw-seed 1",
    "finetune --model model --train-data texts --save run --num-epochs 1",
    "extend --model model --seq-len 64K --data-path d --eval-data-path e --save run --out longer",
    "estimate --model gpt-7b --gpus 8 --mbs 1 --seq-len 8K",
    "plan --model gpt2-tiny --gpus 2 --seq-len 1K --gbs 8",
    "hardware h100-80 --toml",
    "rehearse --model gpt-7b --gpus 8 --gpu h100-80",
    "solve --csv blocks.csv --out placed.csv --capacity 64",
    "report run --out page",
    "doctor --save .",
    "data build texts corpus --tokenizer byte --eval-fraction 0.1",
    "import model --out run",
    "export run --out model",
    "help plan",
)
WORDS = (
    "",
    "None",
    "-1",
    "0",
    "9" * 400,
    "-" + "9" * 20,
    "nan",
    "1e999",
    "1T",
    "\udcff",
    "a\x1b[2J\nb",
    ".",
    "x",
    "--",
)


def mutated_line(seed: int) -> tuple[list[str], str]:
    """The words after `memo`, and how the shell redirects the streams."""
    draw = random.Random(seed)
    words = draw.choice(SEEDS).split()
    for _ in range(draw.randrange(3)):
        place = draw.randrange(len(words))
        kind = draw.randrange(4)
        if kind == 0:
            words[place] = draw.choice(WORDS)
        elif kind == 1:
            words.insert(place + 1, draw.choice(WORDS))
        elif kind == 2 and len(words) > 1:
            del words[place]
        else:
            words[place] = draw.choice(draw.choice(SEEDS).split())
    return words, draw.choice(STREAMS)


def run_line(seed: int, folder: Path) -> tuple[int, str]:
    """The status of one line, and why it is a failure; empty if it is none."""
    words, streams = mutated_line(seed)
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("some words\n")
    (folder / "blocks.csv").write_text("id,lower,upper,size\na,0,2,40\nb,1,3,40\n")
    errors = folder / "errors"
    redirected = streams if "2>" in streams else f"{streams} 2>errors" if "|" not in streams else f"2>errors {streams}"
    script = f'set -o pipefail; "$@" {redirected}'
    command = ["bash", "-c", script, "memo", sys.executable, "-m", "memo", *(os.fsencode(word) for word in words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / "output").open("wb") as output:
        try:
            done = subprocess.run(
                command, check=False, cwd=folder, env=environment, stdout=output, stderr=output, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return -1, f"it did not end within {LIMIT_S:.0f} s"
    told = (folder / "output").read_bytes() + (errors.read_bytes() if errors.exists() else b"")
    if b"Traceback" in told:
        return done.returncode, told.decode(errors="replace").strip().splitlines()[-1]
    if done.returncode not in (0, EXIT_REFUSED, EXIT_FAILED, EXIT_OUTPUT):
        return done.returncode, f"status {done.returncode}"
    return done.returncode, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    assert {line.split()[0] for line in SEEDS} >= {command.name for command in COMMANDS}
    found: collections.Counter[int] = collections.Counter()
    failures = 0
    for seed in range(options.first, options.first + options.lines):
        with tempfile.TemporaryDirectory() as folder:
            status, why = run_line(seed, Path(folder))
        found[status] += 1
        if why:
            failures += 1
            words, streams = mutated_line(seed)
            print(f"seed {seed}: {' '.join(words)!a:.300} {streams}: {why}", flush=True)
    print(f"{sum(found.values())} lines, {failures} failures, statuses {dict(sorted(found.items()))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
