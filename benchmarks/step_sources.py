"""The evidence for the errors of foreseen steps: steps of prime-rl, and the errors with each source left out.

    python benchmarks/step_sources.py

kind step       Published steps of prime-rl (tests/golden/README.md), dense models, layers recomputed. FSDP shards the
                weights that memo's data parallelism holds whole, and is foreseen as data parallelism.
                `between_s` is the time between two steps, in which an RL run without LoRA saves its weights for
                inference (src/prime_rl/trainer/rl/train.py). Published tokens a second include it. Seconds of a step
                do not, and these are compared. A step has three kinds of work that memo does not do:
    rl          To find the ends of documents, the host asks the device for each token's position, one by one
                (get_response_lengths in src/prime_rl/trainer/utils.py, January 2026), and the head makes
                log-probabilities and entropies of chunks by dozens of kernels in fp32. The time of this work a token
                is the difference between steps of kind rl and sft of the same model, device and length: two pairs.
    sft         Logits of the whole sequence in fp32, and a loss that is not fused (src/prime_rl/trainer/sft/train.py):
                WHOLE_LOGITS_BYTES an element more than memo's chunks.
    LoRA        Each adapted matrix has four adapters: the host stacks them, asks the device whether all tokens have
                one, and scales by token (src/prime_rl/trainer/models/layers/lora/multi_linear.py). The additional time
                a token over memo's one adapter comes from pairs with and without LoRA on other machines; a model
                without such a pair is left out.
kind million    TRL 1.13's guide: Qwen3-8B, one sequence of 1,048,576 tokens on 8 H100 over a ring, layers recomputed
                (github.com/huggingface/trl, docs/source/long_context_training.md): 380.1 s, with cuDNN's attention.
                FSDP's gathers of weights are not counted.
kind left out   The error on a source with efficiencies that were fitted or chosen without this source. The efficiency
                of attention on Hopper is then a share, chosen by another source, of the rate of cuDNN's kernels alone.
                memo's own efficiency of Hopper lies between the choices of these sources; steps of memo on an H200
                chose it (benchmarks/gpu_accuracy.py).
"""

import argparse
import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import rows
from frameworks import FSDP
from held_out_accuracy import GPUS, Held, simumax
from simulator_accuracy import GOLDEN

from memo.config import ModelConfig, RunConfig, preset
from memo.config.attention_kernels import FIRST_BEYOND_FLASH_2
from memo.estimate.hardware import Efficiency
from memo.estimate.hardware_files import HARDWARE
from memo.simulate import StepPrediction
from memo.units import DTYPE_BYTES

NAME = "step_sources"
WHOLE_LOGITS_BYTES = 30
"""Bytes that are read and written for an element of logits: cast to fp32 (6 bytes), log-softmax (8), in backward zeros
of the loss (4), log-softmax (12) and the cast (6), less the 6 that memo reads and writes."""
ATTENTION = "prime-rl, 64K"
FLASH_2 = "flash_attention_2"
_QWEN3 = replace(preset("qwen3-8b"), untie_embeddings_and_output_weights=False)
_MODELS: dict[str, ModelConfig] = {
    "Qwen/Qwen3-0.6B": replace(
        _QWEN3, num_layers=28, hidden_size=1024, num_attention_heads=16, num_query_groups=8, ffn_hidden_size=3072
    ),
    "Qwen/Qwen3-4B-Instruct-2507": replace(_QWEN3, hidden_size=2560, ffn_hidden_size=9728),
}
_HARDWARE = {machine.driver_name: name for name, machine in HARDWARE.items()}


class HeldWithCopies(Held):
    """A run with prime-rl's ac_offloading, whose time of copies is added to the step.

    Autograd hooks without a stream of their own copy the input of each checkpointed layer to host memory and back
    (src/prime_rl/utils/act_offloading.py), and compute stands still meanwhile. As many inputs move as under a plan with
    two slots: those of all layers but the last two."""

    def foreseen(self, efficiency: Efficiency | None = None) -> StepPrediction:
        step, config = super().foreseen(efficiency), self.config
        rates = self.machine.offload_gb_per_s, self.machine.prefetch_gb_per_s
        input_gb = config.data.seq_length * config.model.hidden_size * DTYPE_BYTES["bf16"] / 1e9
        inputs = (config.training.global_batch_size or 0) // self.gpus * (config.model.num_layers - 2)
        copies_s = inputs * sum(input_gb / gb_per_s for gb_per_s in rates)
        return replace(step, step_time_s=step.step_time_s + copies_s, parts=step.parts._replace(copies=copies_s))


@dataclass(frozen=True)
class PrimeStep:
    """A published row; `run`: the step as memo would run it."""

    kind: str
    attention: str
    lora: bool
    recomputes: bool
    tokens_per_s: float
    run: Held

    @property
    def seq_length(self) -> int:
        return self.run.config.data.seq_length

    @property
    def tokens(self) -> int:
        """Tokens of one GPU in a step."""
        return self.seq_length * (self.run.config.training.global_batch_size or 0) // self.run.gpus

    @property
    def setting(self) -> tuple[object, ...]:
        return self.run.hardware, self.run.gpus, self.run.model, self.seq_length

    @property
    def foreseen_s(self) -> float:
        return self.run.foreseen().step_time_s

    @property
    def between_s(self) -> float:
        return self.tokens * self.run.gpus / self.tokens_per_s - self.run.step_s

    @property
    def capability(self) -> int:
        return HARDWARE[self.run.hardware].capability

    @property
    def is_memos(self) -> bool:
        """Whether memo would train in this way: all weights, layers recomputed, and memo's choice of attention."""
        is_old = self.attention == FLASH_2 and self.capability >= FIRST_BEYOND_FLASH_2
        return not self.lora and self.recomputes and not is_old

    @property
    def is_known(self) -> bool:
        """Whether the time of the work that memo does not do is known."""
        return not self.lora or bool(adapter_pairs(self))

    @property
    def not_memos_s(self) -> float:
        if self.kind == "rl":
            return self.tokens * (rl_s_a_token(self.capability) + (adapters_s_a_token(self) if self.lora else 0))
        logits_bytes = WHOLE_LOGITS_BYTES * self.tokens * self.run.config.model.vocabulary
        hardware = HARDWARE[self.run.hardware]
        return logits_bytes / (hardware.memory_gb_per_s * 1e9 * hardware.efficiency.memory)

    def row(self) -> dict[str, Any]:
        foreseen_s = self.foreseen_s
        return {
            "kind": "step",
            "hardware": self.run.hardware,
            "gpus": self.run.gpus,
            "model": self.run.model,
            "work": self.kind,
            "lora": self.lora,
            "attention": self.attention,
            "recomputes": self.recomputes,
            "seq_length": self.seq_length,
            "step_s": self.run.step_s,
            "between_s": self.between_s,
            "not_memos_s": self.not_memos_s,
            "foreseen_s": foreseen_s,
            "longer": self.run.longer(),
            "longer_of_memos": (self.run.step_s - self.not_memos_s) / foreseen_s - 1,
            "bar": self.run.bar(),
        }


@cache
def prime_rl() -> tuple[PrimeStep, ...]:
    """Return all published rows of dense models that the repository has."""
    found = []
    with (GOLDEN / "prime_rl_measured.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpus, sequences = int(row["num_gpus"]), int(row["micro_batches"])
            values: dict[str, Any] = {"seq_length": int(row["seq_len"]), "mbs": 1, "gbs": gpus * sequences}
            values |= {"device": "cuda", "offload_alpha": "off", "recompute_granularity": "full"}
            is_lora, recomputes = bool(row["lora_rank"]), row["activations"] == "Recompute"
            values |= {"lora_rank": int(row["lora_rank"]), "params_dtype": "bf16"} if is_lora else {}
            values |= {"attention_backend": "flash"} if row["attention"] == FLASH_2 else {}
            config = RunConfig(model=_MODELS[row["model"]]).override(values)
            held = (Held if recomputes else HeldWithCopies)(
                "prime-rl",
                row["model"],
                config,
                _HARDWARE[row["device"]],
                float(row["step_s"]),
                framework=FSDP,
                gpus=gpus,
            )
            step = PrimeStep(row["kind"], row["attention"], is_lora, recomputes, float(row["tokens_per_s"]), held)
            found.append(step)
    return tuple(found)


@cache
def rl_s_a_token(capability: int) -> float:
    """Return the seconds a token of the additional work of an RL run, compared with a supervised run.

    They come from pairs of steps that differ only in the kind of run: pairs on this kind of chip, or else all pairs."""
    of: dict[tuple[object, ...], dict[str, PrimeStep]] = {}
    for step in prime_rl():
        if not step.lora and step.recomputes:
            of.setdefault(step.setting, {})[step.kind] = step
    pairs = [(pair["sft"], pair["rl"]) for pair in of.values() if len(pair) == 2]
    near = [pair for pair in pairs if HARDWARE[pair[0].run.hardware].capability == capability] or pairs
    return statistics.mean((rl.run.step_s - sft.run.step_s) / rl.tokens for sft, rl in near)


@cache
def adapter_pairs(step: PrimeStep) -> tuple[tuple[PrimeStep, PrimeStep], ...]:
    """Return pairs of steps without and with LoRA that differ only in this, of the same model on other machines.

    Pairs of the same length are preferred to all pairs. Before Hopper torch has no grouped products, by which adapters
    are multiplied."""
    others = [
        other
        for other in prime_rl()
        if other.kind == "rl"
        and other.recomputes
        and other.capability >= FIRST_BEYOND_FLASH_2
        and other.run.model == step.run.model
        and other.run.hardware != step.run.hardware
    ]
    full = {other.setting: other for other in others if not other.lora}
    pairs = [(full[other.setting], other) for other in others if other.lora and other.setting in full]
    return tuple(pair for pair in pairs if pair[0].seq_length == step.seq_length) or tuple(pairs)


def adapters_s_a_token(step: PrimeStep) -> float:
    """Return the seconds a token that LoRA takes longer in prime-rl than in memo."""
    return statistics.mean(
        (lora.run.step_s - full.run.step_s - lora.foreseen_s + full.foreseen_s) / lora.tokens
        for full, lora in adapter_pairs(step)
    )


def trl() -> list[Held]:
    values = {"seq_length": 1 << 20, "cp": GPUS, "gbs": 1, "device": "cuda"}
    values |= {"offload_alpha": "off", "recompute_granularity": "full"}
    return [
        Held(
            "trl 1m", "qwen3-8b", RunConfig(model=preset("qwen3-8b")).override(values), "h100-80", 380.1, framework=FSDP
        )
    ]


def attention_steps() -> list[Held]:
    """Return the steps of prime-rl in which attention takes most time."""
    return [step.run for step in prime_rl() if step.is_memos and step.seq_length >= 65536]


def with_attention(share: float) -> Efficiency:
    """Return Hopper's efficiencies if attention reaches this share of the rate of cuDNN's kernels at 32K tokens."""
    with (GOLDEN / "cudnn_attention.csv").open(newline="", encoding="utf-8") as file:
        rows_alone = [row for row in csv.DictReader(file) if row["seq_len"] == "32768"]
    h200 = HARDWARE["h200"]
    (alone,) = (row for row in rows_alone if row["gpu"] == h200.driver_name)
    peak = h200.peak_tflops["bf16"]
    forward, backward = (share * float(alone[f"{name}_tflops"]) / peak for name in ("forward", "backward"))
    return replace(h200.efficiency, attention_forward=forward, attention_backward=backward)


def chosen_by(runs: Sequence[Held]) -> float:
    """Return the share for which the mean error of these runs is 0."""

    def longer(share: float) -> float:
        return statistics.mean(run.longer(with_attention(share)) for run in runs)

    low, high = 0.3, 1.5
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if longer(middle) < 0 else (low, middle)
    return low


def left_out() -> list[dict[str, Any]]:
    """Return a row for each source that is left out."""
    prime, million = attention_steps(), trl()
    found = [
        _left_out(ATTENTION, prime, "TRL", with_attention(chosen_by(million))),
        _left_out("TRL, 1M", million, "prime-rl", with_attention(chosen_by(prime))),
        _left_out("prime-rl and TRL", [*prime, *million], "cuDNN alone", with_attention(1.0)),
        _left_out("SimuMax, B200", simumax(), "its kernels, not its steps", None),
        _left_out("SimuMax, B200", simumax(), "nothing of B200: Hopper's", HARDWARE["h200"].efficiency),
    ]
    for row in rows.read("simulator_accuracy"):
        if row.get("family") and row["left_out"] == row["table"]:
            ampere = {"p4d 4": "A100's"}.get(row["table"], "the other two tables")
            shares = {"mean": row["mean_error_percent"] / 100, "worst": row["worst_percent"] / 100}
            found.append({"kind": "left out", "source": row["table"], "runs": row["rows"], "by": ampere, **shares})
    return found


def _left_out(source: str, runs: Sequence[Held], by: str, efficiency: Efficiency | None) -> dict[str, Any]:
    errors = [run.longer(efficiency) for run in runs]
    return {
        "kind": "left out",
        "source": source,
        "runs": len(runs),
        "by": by,
        "mean": statistics.mean(map(abs, errors)),
        "worst": max(errors, key=abs),
        "attention": None if efficiency is None else [efficiency.attention_forward, efficiency.attention_backward],
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = [step.row() for step in prime_rl() if step.is_known]
    results += [{"kind": "million", **run.row()} for run in trl()] + left_out()
    for row in results:
        print(json.dumps(row))
    print(f"kept in {rows.write(NAME, results)}")


if __name__ == "__main__":
    main()
