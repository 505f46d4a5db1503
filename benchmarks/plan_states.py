"""Plans of `memo.plan` for training on a few GPUs: method, batch, placement of states, and expected speed.

    python benchmarks/plan_states.py [--seq-len 4096]

Models of 7B to 70B are planned for one GPU of 24 GB, one of 80 GB, and eight of 80 GB. As in the tables of LLMem, each
machine has its method and batch; further columns are the placement of states, tokens per second, and the busiest
resource. Everything is simulated (memo.simulate); nothing was measured.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memo.config import ModelConfig, preset
from memo.search import Plan, Question, ask, search
from memo.search.question import PlannedModel
from memo.spec.shapes import shape_of
from memo.units import GIB

RESULTS = Path(__file__).parent / "results" / "plan_states.jsonl"
QWEN_32B = replace(
    preset("qwen3-8b"), num_layers=64, hidden_size=5120, num_attention_heads=64, kv_channels=128, ffn_hidden_size=25600
)
"""The published config.json of Qwen3-32B."""
MODELS = ("gpt-7b", "llama-3.1-8b", "gpt-13b", "qwen3-32b", "llama-3.1-70b")


@dataclass(frozen=True)
class Machine:
    """GPUs of one node; PCIe and host are those of the named machine."""

    gpus: int
    memory_gib: float
    hardware: str
    host_memory_gib: float

    def __str__(self) -> str:
        return f"{self.gpus} x {self.memory_gib:g} GB"


MACHINES = (
    Machine(1, 24, "a100-40", 256),
    Machine(1, 80, "a800-80", 512),
    Machine(8, 80, "a800-80", 2048),
)


def question_of(name: str, machine: Machine, seq_len: int, batch: int) -> Question:
    question = ask(
        "qwen3-8b" if name == "qwen3-32b" else name,
        machine.gpus,
        seq_len=seq_len,
        global_batch_size=batch,
        hardware=machine.hardware,
        gpu_memory_gib=machine.memory_gib,
        host_memory_gib=machine.host_memory_gib,
    )
    return replace(question, model=planned(QWEN_32B, name, seq_len)) if name == "qwen3-32b" else question


def planned(model: ModelConfig, name: str, seq_len: int) -> PlannedModel:
    return PlannedModel(name, shape_of(model, name, seq_len), model, model)


def rows(seq_len: int, batch: int) -> Iterator[dict[str, object]]:
    for machine in MACHINES:
        for name in MODELS:
            plan = search(question_of(name, machine, seq_len, batch), top=1)
            yield {
                "model": name,
                "machine": str(machine),
                "seq_len": seq_len,
                "global_batch_size": batch,
                **cells(plan),
            }


def cells(plan: Plan) -> dict[str, object]:
    """Return method, micro-batch, placement and speed of the best plan, or the limit if nothing fits."""
    best = plan.best
    if best is None:
        least = min(plan.refusals, key=lambda refusal: len(refusal.text), default=None)
        return {"method": "none", "why": "" if least is None else plan.refusals[0].text}
    layout, at = best.layout, best.strategy.placement
    axes = [f"{axis}{size}" for axis, size in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp)) if size > 1]
    dp = plan.question.gpus // layout.ranks
    zero = {"optim": "ZeRO-1", "optim_grads": "ZeRO-2", "optim_grads_params": "ZeRO-3"}[best.strategy.sharding]
    axes += [f"dp{dp} {zero}"] if dp * layout.cp > 1 else []
    return {
        "method": " ".join(axes) or "one GPU",
        "micro_batch_size": layout.mbs,
        "activations": str(best.strategy._replace(placement=None, sharding="optim")),
        "states_in_host_memory": "none"
        if at is None or not at.optimizer
        else f"{at.optimizer}+{at.gradients}+{at.weights} of {at.layers}",
        "tokens_per_s": round(best.step.tgs * plan.question.gpus, 1),
        "step_time_s": round(best.step.step_time_s, 3),
        "binding": best.step.binding,
        "gpu_gib": round(best.sized.memory.total / GIB, 1),
        "host_gib": round(best.sized.host_bytes / GIB, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--gbs", type=int, default=8, help="sequences of one step")
    options = parser.parse_args()
    heads = ("machine", "model", "method", "mbs", "activations", "states in host memory", "tokens/s", "binding")
    print(" | ".join(heads))
    found = list(rows(options.seq_len, options.gbs))
    for row in found:
        shown = [row["machine"], row["model"], row["method"]]
        if row["method"] == "none":
            print(" | ".join(map(str, [*shown, row["why"]])))
            continue
        names = ("micro_batch_size", "activations", "states_in_host_memory", "tokens_per_s", "binding")
        print(" | ".join(str(cell) for cell in [*shown, *(row[name] for name in names)]))
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()
