"""Figures of pages from rows of measurements, of the emulated GPU and of published runs."""

import csv
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import full_size
import gpu_accuracy
import page_scaled
import rows
import timed_accuracy
from page_foreseen import is_of_published_table
from page_tables import markdown
from scaled_node import NODE, NODE_HIDDEN
from simulator_accuracy import GOLDEN

from memo.config import preset
from memo.estimate.time_errors import TIE_SHARE
from memo.units import GIB

Row = dict[str, Any]
A100_NODE = 8
LONG_OVER_HIDDEN = 16
"""Least length over hidden size of the README's figures: 64K tokens with a hidden size of 4,096."""


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def upward(share: float, digits: int = 1) -> str:
    """Return a bound: the percentage rounded away from zero."""
    scale = 10.0**digits
    return f"{math.ceil(100 * share * scale - 1e-9) / scale:.{digits}f} %"


# Measured on a CPU


def longest(way: str) -> int:
    """Return the tokens that a way trains in the device memory of benchmarks/scaled_longest.py."""
    found: int = {row["way"]: row["seq_length"] for row in rows.read("scaled_longest")}[way]
    return found


def reach_over(way: str) -> Callable[[], str]:
    """Return a figure: the tokens that swept layers train there, divided by those of a way."""
    return lambda: f"{longest('memo-swept') / longest(way):.1f}"


def quarter_million(way: str) -> Row:
    return {row["way"]: row for row in rows.read("quarter_million")}[way]


def cpu_memory() -> list[float]:
    """Return the errors of foreseen peaks against those of torch on a CPU."""
    return [row["error"] for row in rows.read("memory_accuracy")]


# Measured on a GPU


@functools.cache
def on_gpu() -> list[Row]:
    """Return the runs on a GPU with their foreseen values."""
    return gpu_accuracy.beside_foresight(rows.read(gpu_accuracy.FILE))


def on_gpu_at(way: str) -> Row:
    """Return the row of a way for one rank at the longest sequence on a GPU."""
    return max((row for row in on_gpu() if row["way"] == way), key=lambda row: row["seq_length"])


def over_recompute_on_gpu() -> str:
    return f"{on_gpu_at('full-recompute')['step_p50_s'] / on_gpu_at('full-swap-plan')['step_p50_s']:.2f}"


def gib_on_gpu(way: str) -> str:
    return f"{on_gpu_at(way)['allocated_peak_bytes'] / GIB:.1f}"


def memory_worst_on_gpu() -> str:
    return upward(max(abs(row["memory_off_percent"]) for row in on_gpu() if "memory_off_percent" in row) / 100)


def time_worst_on_gpu(with_experts: bool) -> str:
    """Of models with or without a mixture of experts."""
    lines = [row for row in on_gpu() if "time_off_percent" in row]
    of_kind = [row for row in lines if (preset(row["model"]).num_experts > 0) == with_experts]
    return upward(max(abs(row["time_off_percent"]) for row in of_kind) / 100, 0)


# Measured on the scaled node


def in_half() -> list[Row]:
    """Return rows of the node with the proportions of MEMO's own, where all ways have half of the ideal's memory."""
    lines = [row for row in rows.read("scaled_node") if not row["one_node"]]
    return [row for row in lines if row.get("node", NODE.name) == NODE.name]


def long_lengths() -> list[Row]:
    """Return memo's speed over each other way on a node of A800s, at each length that stands for 64K tokens or more."""
    lines = page_scaled.of_length(in_half())
    return [row for row in lines if row["length_over_hidden"] >= LONG_OVER_HIDDEN]


def span(values: Iterable[float], form: str = ".2f") -> str:
    values = list(values)
    return f"{min(values):{form}} to {max(values):{form}}"


def over(way: str, least: int = LONG_OVER_HIDDEN) -> str:
    """Return memo's speed over that of a way: the smallest and largest ratio over the lengths."""
    return span(row[way] for row in long_lengths() if row["length_over_hidden"] >= least)


def scaled_tokens() -> str:
    lengths = {row["hidden_size"] * row["length_over_hidden"] for row in long_lengths()}
    return f"{min(lengths):,} to {max(lengths):,}"


def scaled_stand_for() -> str:
    lengths = {NODE_HIDDEN * row["length_over_hidden"] // 1024 for row in long_lengths()}
    return f"{min(lengths)}K to {max(lengths) // 1024}M"


def papers_own() -> str:
    """Return MEMO's speed over full recomputation with planned memory, printed in its table 4: measured on A800."""
    with (GOLDEN / "memo_table4_ablation.csv").open(newline="", encoding="utf-8") as file:
        mfu = {(row["method"], row["seq_k"]): row["mfu_percent"] for row in csv.DictReader(file) if row["mfu_percent"]}
    lengths = [length for method, length in mfu if method == "full_recompute+plan"]
    return span(float(mfu["memo", length]) / float(mfu["full_recompute+plan", length]) for length in lengths)


# On the emulated GPU


def emulated_errors() -> dict[tuple[str, str], float]:
    """Return the error of foreseen bytes (foreseen / allocated - 1) of each full-size run, by name and allocator."""
    return {
        (row["name"], row["allocator"]): full_size.foreseen(row).allocated / row["allocated_bytes"] - 1
        for row in rows.read("full_size")
    }


def rehearsal(name: str) -> Callable[[], str]:
    """Return a figure: the output of `memo rehearse` for a run."""
    return lambda: "\n".join(("```", {row["name"]: row for row in rows.read("rehearsals")}[name]["printed"], "```"))


def emulated_worst() -> str:
    return upward(max(map(abs, emulated_errors().values())), 2)


def emulated_runs() -> str:
    return str(len({name for name, _ in emulated_errors()}))


def sweeps() -> str:
    """Return by how much a step is longer with swept layers than with whole layers, by tokens of a tile."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    lines = [row for row in rows.read("sweep_speed") if row["kind"] == "foreseen"]
    for row in lines:
        tile = f"{row['seq_length'] // row['tiles']:,}"
        run = f"{row['model']}, {row['gpus']} x {row['hardware']}"
        found.setdefault((run, tile), {})[row["seq_length"]] = row["ratio"] - 1
    lengths = sorted({row["seq_length"] for row in lines})
    heads = ["run", "tokens of a tile", *(f"{length // 1024}K" for length in lengths)]
    table = [[*key, *(percent(more[length]) for length in lengths)] for key, more in found.items()]
    return markdown(heads, table)


# Published runs


def runs(table: str) -> list[Row]:
    return [row for row in rows.read("simulator_accuracy") if row["table"] == table and "error_percent" in row]


def within(errors: Sequence[float]) -> float:
    """Return the bound within which nine of ten errors stay."""
    return sorted(map(abs, errors))[math.ceil(0.9 * len(errors)) - 1]


_MEMO = "MEMO on A800, swapping and full recomputation with planned memory"
_PUBLISHED = {
    "Megatron-LM on A100, 8 to 256 GPUs": ("p4d 3",),
    "Megatron-LM on H100, 4 to 64 GPUs": ("p4d 4",),
    _MEMO: ("memo 3 memo", "memo 4"),
}


def published() -> str:
    """Return the errors of the simulator on the runs to which its efficiencies were fitted."""
    told = {row["table"]: row for row in rows.read("simulator_accuracy") if is_of_published_table(row)}
    lines = []
    for label, tables in _PUBLISHED.items():
        errors = [row["error_percent"] for table in tables for row in runs(table)]
        regrets = told[tables[0]].get("regret_percent", {}).values()
        lost = f"{max(regrets):.1f} %" if regrets else ""
        mean = f"{statistics.mean(map(abs, errors)):.1f} %"
        bias = f"{statistics.mean(errors):+.1f} %"
        lines.append((label, str(len(errors)), mean, bias, f"{within(errors):.0f} %", lost))
    best = "the layout foreseen to be fastest, slower than the best by at most"
    return markdown(("runs", "how many", "mean error of the speed", "bias", "nine of ten within", best), lines)


def pairs(near: bool) -> list[bool]:
    """Return for pairs of published layouts, `near` in foreseen speed or not, whether the foreseen order was right."""
    found = []
    for table in ("p4d 3", "p4d 4"):
        for gpus in {row["gpus"] for row in runs(table)}:
            own = [(row["predicted_tflops"], row["measured_tflops"]) for row in runs(table) if row["gpus"] == gpus]
            for first, second in combinations(sorted(own, reverse=True), 2):
                if (first[0] / second[0] - 1.0 <= TIE_SHARE) == near:
                    found.append(first[1] >= second[1])
    return found


def a100(in_one_node: bool) -> list[float]:
    """Return errors in percent on A100, of layouts whose copy of the model is in one node or spans several nodes."""
    found = [(row["error_percent"], math.prod(row["tp_cp_pp_mbs"][:3])) for row in runs("p4d 3")]
    return [error for error, ranks in found if (ranks <= A100_NODE) == in_one_node]


def memos_own(is_of: Callable[[int], bool]) -> list[float]:
    """Return errors in percent on the runs of MEMO's tables 3 and 4, for some lengths."""
    lines = [row for table in _PUBLISHED[_MEMO] for row in runs(table)]
    return [row["error_percent"] for row in lines if is_of(row["seq_length"])]


def left_out(family: str, table: str) -> Row:
    """Return the summary of a table that was left out of the fit."""
    lines = rows.read("simulator_accuracy")
    return next(row for row in lines if row.get("family") == family and row.get("left_out") == row["table"] == table)


def left_out_mean(family: str, table: str) -> Callable[[], str]:
    return lambda: f"{left_out(family, table)['mean_error_percent']:.3g} %"


def held_out(source: str, least_length: int = 0) -> list[Row]:
    lines = [row for row in rows.read("held_out_accuracy") if row.get("source") == source]
    return [row for row in lines if row["seq_length"] >= least_length]


def held_out_table() -> str:
    """Return the table of published steps to which nothing was fitted."""
    all_of = "Megatron-LM on 8 B200, as SimuMax v1.2 published them: Llama 3 70B and 405B cut to 12 and 4 layers"
    long_of = "of these, 32K and 128K tokens over cp 4 and 8"
    trl = "TRL 1.13, Qwen3-8B, 1,048,576 tokens on 8 H100"
    lines = []
    found = ((all_of, b200()), (long_of, held_out("simumax b200", 32768)), (trl, held_out("trl 1m")))
    for label, own in (each for each in found if each[1]):
        errors = [row["error"] for row in own]
        others = [row["other_error"] for row in own if "other_error" in row]
        short = f"{sum(error < 0 for error in errors)} of {len(errors)}"
        nine = percent(within(errors), 0) if len(errors) > 1 else ""
        theirs = percent(statistics.mean(map(abs, others))) if others else ""
        mean, bias = percent(statistics.mean(map(abs, errors))), f"{100 * statistics.mean(errors):+.1f} %"
        lines.append((label, str(len(errors)), mean, bias, short, nine, theirs))
    heads = ("runs", "how many", "mean error of the step", "bias", "foreseen too short", "nine of ten within")
    return markdown((*heads, "SimuMax's mean error"), lines)


def b200() -> list[Row]:
    return held_out("simumax b200")


def b200_of_tp8() -> str:
    """Return by how much the steps of the 70B model with tp 8 are foreseen as too short."""
    errors = [-row["error"] for row in b200() if row["model"] == "llama-3-70b" and row["tp_cp_pp"][0] == 8]
    return f"{100 * min(errors):.0f} to {percent(max(errors), 0)}"


def b200_memory(name: str, digits: int = 1) -> tuple[str, str]:
    """Return the mean and the worst error of memory, without signs."""
    errors = [abs(row[name]) for row in b200()]
    return percent(statistics.mean(errors), digits), percent(max(errors), digits)


_SWEPT_ON_DISK = "swept, records on a disk"
FIGURES: dict[str, Callable[[], str]] = {
    "reach_over_alst": reach_over("alst"),
    "reach_over_recompute": reach_over("full-recompute"),
    "reach_over_whole": reach_over("whole-layers-recompute"),
    "reach_memo": lambda: f"{longest('memo-swept'):,}",
    "reach_alst": lambda: f"{longest('alst'):,}",
    "reach_recompute": lambda: f"{longest('full-recompute'):,}",
    "reach_whole": lambda: f"{longest('whole-layers-recompute'):,}",
    "reach_layers": lambda: str(rows.read("scaled_longest")[0]["layers"]),
    "reach_mib": lambda: f"{rows.read('scaled_longest')[0]['device_bytes'] / 2**20:.0f}",
    "cpu_memory_worst": lambda: upward(max(map(abs, cpu_memory())), 2),
    "cpu_memory_runs": lambda: str(len(cpu_memory())),
    "kills": lambda: str(len(rows.read("kill_campaign"))),
    "kills_longest": lambda: f"{max(row['gone_s'] for row in rows.read('kill_campaign')):.0f} s",
    "kills_timeout": lambda: f"{max(row['timeout_s'] for row in rows.read('kill_campaign')):.0f} s",
    "quarter_loss": lambda: str(quarter_million("swept")["lm_loss"]),
    "quarter_norm": lambda: str(quarter_million("swept")["grad_norm"]),
    "quarter_mib": lambda: f"{quarter_million('swept')['device_cap_gib'] * 1024:.0f}",
    "quarter_host_mib": lambda: f"{quarter_million('swept')['host_records_bytes'] / 2**20:.0f}",
    "quarter_disk_mib": lambda: f"{quarter_million(_SWEPT_ON_DISK)['host_records_bytes'] / 2**20:.0f}",
    "scaled_over_recompute": lambda: over("full-recompute"),
    "scaled_over_alst": lambda: over("alst"),
    "scaled_of_ideal": lambda: over("ideal", 2 * LONG_OVER_HIDDEN),
    "scaled_tokens": scaled_tokens,
    "scaled_stand_for": scaled_stand_for,
    "papers_own": papers_own,
    "gpu_of_ideal": lambda: f"{on_gpu_at('full-swap-plan')['of_ideal']:.2f}",
    "gpu_over_recompute": over_recompute_on_gpu,
    "gpu_memory_worst": memory_worst_on_gpu,
    "gpu_time_worst": lambda: time_worst_on_gpu(with_experts=False),
    "gpu_time_worst_experts": lambda: time_worst_on_gpu(with_experts=True),
    "gpu_runs": lambda: str(sum("memory_off_percent" in row for row in on_gpu())),
    "gpu_kept": lambda: gib_on_gpu("none"),
    "gpu_swapped": lambda: gib_on_gpu("full-swap-plan"),
    "gpu_mfu": lambda: f"{on_gpu_at('full-swap-plan')['mfu_causal_percent']:.0f} %",
    "emulated_worst": emulated_worst,
    "emulated_runs": emulated_runs,
    "rehearsal_gpt_1m": rehearsal("gpt_1m"),
    "rehearsal_llama_1m": rehearsal("llama_1m"),
    "sweeps": sweeps,
    "time_differences": lambda: timed_accuracy.table(rows.read("timed_accuracy")),
    "time_ratios": lambda: timed_accuracy.ratios(rows.read("timed_accuracy")),
    "published": published,
    "published_runs": lambda: str(sum(len(runs(table)) for tables in _PUBLISHED.values() for table in tables)),
    "pairs_near": lambda: str(len(pairs(near=True))),
    "pairs_near_wrong": lambda: percent(pairs(near=True).count(False) / len(pairs(near=True)), 0),
    "pairs_far": lambda: str(len(pairs(near=False))),
    "pairs_far_wrong": lambda: percent(pairs(near=False).count(False) / len(pairs(near=False)), 0),
    "a100_slow": lambda: f"{-min(a100(in_one_node=True)):.0f} %",
    "a100_fast": lambda: f"{max(a100(in_one_node=True)):.0f} %",
    "a100_two_nodes": lambda: f"{max(a100(in_one_node=False)):.0f} %",
    "memo_64k": lambda: f"{-min(memos_own(lambda length: length == 65536)):.1f} %",
    "memo_512k": lambda: f"{max(memos_own(lambda length: length >= 524288)):.1f} %",
    "left_out_a100": left_out_mean("ampere", "p4d 3"),
    "left_out_memo3": left_out_mean("ampere", "memo 3 memo"),
    "left_out_memo4": left_out_mean("ampere", "memo 4"),
    "left_out_h100": left_out_mean("hopper", "p4d 4"),
    "left_out_h100_within": lambda: f"{left_out('hopper', 'p4d 4')['nine_of_ten_within_percent']:.0f} %",
    "held_out": held_out_table,
    "b200_tp8": b200_of_tp8,
    "b200_runs": lambda: str(len(b200())),
    "b200_short": lambda: str(sum(row["error"] < 0 for row in b200())),
    "b200_memory_mean": lambda: b200_memory("memory_error")[0],
    "b200_memory_worst": lambda: b200_memory("memory_error")[1],
    "b200_simumax_memory_mean": lambda: b200_memory("other_memory_error")[0],
    "b200_simumax_memory_worst": lambda: b200_memory("other_memory_error")[1],
    "b200_fitted_least": lambda: percent(min(row["fitted_memory_error"] for row in b200())),
    "b200_fitted_most": lambda: percent(max(row["fitted_memory_error"] for row in b200())),
}
