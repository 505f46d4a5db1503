"""Best plans of `memo plan` from 64 to 4,096 GPUs and up to 16M tokens, and for the rows of MEMO's tables.

    python benchmarks/plan_scale.py

There are two kinds of rows. "scale" rows have the best plan of gpt-65b (MEMO's) on a800-80 at each size, with the
larger of 16 sequences and 16M tokens a step; they are predictions far beyond the runs to which memo was fitted.
"published" rows are those of MEMO's table 7 (strategies of its system, models of 7B to 65B) with the MFU of its table 3
if it prints one. Each has the best plan for the same GPUs and length with 16 sequences a step (MEMO names no batch),
and the prediction for the printed strategy. MEMO keeps all logits at once, so it runs out of memory earlier than memo,
whose loss is chunked.
"""

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rows

from memo.search import Choice, ask, search
from memo.search.candidates import Layout, Strategy
from memo.search.ranking import evaluate
from memo.units import GIB

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
GPUS = (64, 256, 1024, 4096)
LENGTHS = tuple(1 << power for power in range(16, 25, 2))
SEQUENCES = 16
STEP_TOKENS = 1 << 24
MODELS = {"7B": "gpt-7b", "13B": "gpt-13b", "30B": "gpt-30b", "65B": "gpt-65b"}


def scale() -> Iterator[dict[str, Any]]:
    """Yield the best plan for each number of GPUs and each length."""
    for gpus in GPUS:
        for seq_length in LENGTHS:
            batch = max(SEQUENCES, STEP_TOKENS // seq_length)
            question = ask("gpt-65b", gpus, seq_len=seq_length, global_batch_size=batch)
            began_s = time.process_time()
            plan = search(question, top=1)
            yield {
                "kind": "scale",
                "model": "gpt-65b",
                "gpus": gpus,
                "seq_length": seq_length,
                "global_batch_size": batch,
                "candidates": plan.num_candidates,
                "search_cpu_s": time.process_time() - began_s,
                "plan": _choice(plan.best),
                "refused": {str(reason): count for reason, count in plan.counts().items()},
            }


def published() -> Iterator[dict[str, Any]]:
    """Yield printed strategies and MFU with the plan for the same question."""
    measured = {
        (row["model"], row["seq_k"]): float(row["mfu_percent"])
        for row in _golden("memo_table3_mfu_tgs")
        if row["method"] == "memo" and row["status"] == "ok"
    }
    for row in _golden("memo_table7_memo"):
        gpus, seq_length = int(row["gpus"]), int(row["seq_k"]) << 10
        question = ask(MODELS[row["model"]], gpus, seq_len=seq_length, global_batch_size=SEQUENCES)
        printed = None
        if row["status"] == "ok":
            layout = Layout(int(row["tp"]), int(row["cp"]), int(row["pp"]))
            printed = _choice(evaluate(question, layout, Strategy(float(row["alpha"]))))
        yield {
            "kind": "published",
            "model": MODELS[row["model"]],
            "gpus": gpus,
            "seq_length": seq_length,
            "printed_status": row["status"],
            "printed_mfu_percent": measured.get((row["model"], row["seq_k"])),
            "printed_strategy": printed,
            "plan": _choice(search(question, top=1).best),
        }


def _golden(name: str) -> list[dict[str, str]]:
    with (GOLDEN / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _choice(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {
        "layout": str(choice.layout),
        "activations": str(choice.strategy),
        "moved_tiles": choice.moved,
        "limit": choice.limit,
        "mfu_percent": choice.step.mfu_percent,
        "tgs": choice.step.tgs,
        "gpu_gib": choice.sized.memory.total / GIB,
        "host_gib": choice.sized.host_bytes / GIB,
        "verdict": str(choice.sized.verdict),
    }


def _line(row: dict[str, Any]) -> str:
    plan = row["plan"]
    chosen = "nothing fits"
    if plan is not None:
        chosen = f"{plan['layout']}, {plan['activations']}: MFU {plan['mfu_percent']:.1f} %, {plan['gpu_gib']:.1f} GiB"
    printed = ""
    if row["kind"] == "published":
        mfu = row["printed_mfu_percent"]
        printed = f" (printed: {row['printed_status']}{'' if mfu is None else f', MFU {mfu} %'})"
    return f"{row['model']} {row['gpus']:>5} GPUs {row['seq_length'] >> 10:>6}K  {chosen}{printed}"


def main() -> None:
    found = []
    for row in (*published(), *scale()):
        print(_line(row), flush=True)
        found.append(row)
    print(rows.write("plan_scale", found))


if __name__ == "__main__":
    main()
