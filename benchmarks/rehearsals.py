"""Runs `memo rehearse` for the runs that the guide shows, keeps its output as rows, and writes the pages from them.

    python benchmarks/rehearsals.py [--python FILE]

Needs the Python of an environment with a CUDA build of torch, and no GPU (`make emulated` makes such an environment).
On the emulated GPU memory is the program's own, and times are modelled. Each run takes a minute or two on two cores.
"""

import argparse
import shlex
import subprocess
import tempfile

import foreseen_plans
import report
import rows

FILE = "rehearsals"
EVIDENCE = "on the emulated GPU"
RUNS = {
    # name: arguments of `memo rehearse`; run.toml is what `memo plan` writes for PLANNED
    "gpt_1m": "--gpu h100-80 --gpus 8 --model gpt-7b --seq-len 1048576 --tp 8",
    "llama_1m": "--gpu h100-80 --gpus 8 --config run.toml --gbs 1 --mock-data",
}
PLANNED = "h100x8_1m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    emulated = str(rows.ROOT / ".venv-emulated" / "bin" / "python")
    parser.add_argument("--python", default=emulated, metavar="FILE", help="default: that of .venv-emulated")
    memo = [parser.parse_args().python, "-m", "memo"]
    journal = rows.Journal(FILE)
    with tempfile.TemporaryDirectory() as folder:
        plan = [*memo, "plan", *shlex.split(foreseen_plans.QUESTIONS[PLANNED]), "--out", "run.toml"]
        subprocess.run(plan, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for name, arguments in RUNS.items():
            run = [*memo, "rehearse", *shlex.split(arguments)]
            printed = subprocess.run(run, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout.rstrip()
            journal.add({"evidence": EVIDENCE, "name": name, "arguments": arguments, "printed": printed})
    for page in report.write():
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
