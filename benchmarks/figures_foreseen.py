"""Figures of pages that `memo plan` foresees: tables and numbers from the rows of benchmarks/foreseen_plans.py."""

import functools
import re
from collections.abc import Callable
from typing import Any

import rows
from page_tables import markdown

Row = dict[str, Any]
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def row_of(name: str) -> Row:
    """Return the answer to a question. Raises KeyError if the question was never asked."""
    return {row["name"]: row for row in rows.read("foreseen_plans")}[name]


def best_of(row: Row) -> Row:
    found: Row = row["choices"][0]
    return found


def machine(row: Row) -> str:
    """Return the GPUs, the used part of their memory unless all is used, and the other memory of the node."""
    part = f", {row['gpu_memory_gib']:g} GiB of it" if row["hardware"] == "a100-40" else ""
    disk = f", {row['nvme_gib']:,g} GiB of NVMe" if row["nvme_gib"] else ""
    return f"{row['gpus']} x {row['hardware']}{part}, {row['host_memory_gib']:,g} GiB{disk}"


def layout(row: Row) -> str:
    """Return the parallelism, the sweep, and the states that are in host memory."""
    best = best_of(row)
    parts = [f"{axis} {best[axis]}" for axis in ("tp", "cp", "pp") if best[axis] > 1]
    parts += [f"{best['cp_comm_type']}"] if best["cp"] > 1 else []
    parts += [f"layers swept in {best['swept_tiles']} tiles"] if best["swept_tiles"] else []
    held = [
        *(["states"] if best["states_in_host_memory"] else []),
        *(["hidden states"] if best["hidden_states_in_host_memory"] else []),
    ]
    parts += [f"{' and '.join(held)} in host memory"] if held else []
    return ", ".join(parts) or "one GPU"


def million(tokens: float) -> str:
    """7.27 million, with three digits."""
    return f"{tokens / 1e6:.3g} million"


def period(seconds: float) -> str:
    """Seconds as minutes, hours or days, with two digits or more."""
    for unit_s, name in ((DAY_S, "days"), (HOUR_S, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit_s:
            count = seconds / unit_s
            return f"{count:.0f} {name}" if count >= 10 else f"{count:.1f} {name}"
    return f"{seconds:.0f} seconds"


def sequence_s(row: Row) -> float:
    """Seconds that one sequence of a step takes."""
    found: float = best_of(row)["step_time_s"] / row["global_batch_size"]
    return found


def billion_s(row: Row) -> float:
    """Seconds for a billion tokens."""
    return 1e9 / row["seq_len"] * sequence_s(row)


def limit(row: Row) -> str:
    """Return the resource that a longer sequence lacks: the one that `memo plan` names first."""
    told: str = row["longest"]["limit"]
    for resource in ("host memory", "GPU memory", "device memory"):
        if told.startswith(resource):
            return resource.replace("device", "GPU")
    return told.partition(":")[0]


_SIZES: dict[str, Callable[[Row], str]] = {
    "tokens/GPU/s": lambda row: f"{best_of(row)['tgs']:,.0f}",
    "±%": lambda row: f"{best_of(row)['tgs_error_percent']:.0f}",
    "a sequence": lambda row: period(sequence_s(row)),
    "GPU": lambda row: f"{best_of(row)['total_gib']:.1f} GiB",
    "host memory": lambda row: f"{best_of(row)['host_gib']:,.0f} GiB",
}
_PLAN: dict[str, Callable[[Row], str]] = {
    "machine, its host memory": machine,
    "tokens": lambda row: f"{row['seq_len']:,}",
    "layout": layout,
    **_SIZES,
}
_DISK: dict[str, Callable[[Row], str]] = {
    **_PLAN,
    "NVMe": lambda row: f"{best_of(row)['nvme_gib']:,.0f} GiB",
    "disk busy": lambda row: f"{best_of(row)['resources'].get('disk', 0.0) / best_of(row)['step_time_s']:.0%}",
}
_LONGEST: dict[str, Callable[[Row], str]] = {
    "model": lambda row: str(row["model"]),
    "machine, host memory of a node": machine,
    "tokens": lambda row: f"{row['seq_len']:,}",
    "layout": layout,
    "layers that recompute attention": lambda row: str(best_of(row)["recompute_attention_layers"] or "none"),
    "a sequence": lambda row: period(sequence_s(row)),
    "a billion tokens": lambda row: period(billion_s(row)),
    "what binds": limit,
}
_LARGEST: dict[str, Callable[[Row], str]] = {
    "machine, its host memory": machine,
    "family": lambda row: str(row["largest"]["family"]),
    "parameters": lambda row: f"{row['largest']['parameters'] / 1e9:.3g}B",
    "with `--clip-grad 0`": lambda row: f"{row['largest']['unclipped_parameters'] / 1e9:.3g}B",
}


def table(columns: dict[str, Callable[[Row], str]], *names: str) -> str:
    found = [row_of(name) for name in names]
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in found])


def shown(row: Row) -> list[str]:
    """Return every cell of this row in the tables, and the texts that pages show as they were printed."""
    columns = [_DISK]
    columns += [_LONGEST] if row["longest"] else []
    columns += [_LARGEST] if row["largest"] else []
    return [*(f"{head}: {cell(row)}" for each in columns for head, cell in each.items()), row.get("printed", "")]


def recipe() -> str:
    """Return the printed table of the plans of a million tokens, and the printed lines about the best plan."""
    lines = row_of("h100x8_1m")["printed"].splitlines()
    head = next(at for at, line in enumerate(lines) if "tok/GPU/s" in line)
    told = ("= ", "  the first ", "tight: ", "best: ", "surely fits: ", "binding limit: ", "CUDA, ", "a step takes ")
    shown = [line for line in lines[head + 1 :] if re.match(r" *\d+=? ", line) or line.startswith(told)]
    first = next(at for at, line in enumerate(shown) if not re.match(r" *\d+=? ", line))
    return "\n".join(["```", lines[head], *shown[:first], "", *shown[first:], "```"])


def recipe_choice() -> Row:
    """Return the choice with the recipe's layout, tp 2 and cp 4, among the first choices for a million tokens."""
    choices: list[Row] = row_of("h100x8_1m")["choices"]
    return next(choice for choice in choices if (choice["tp"], choice["cp"], choice["pp"]) == (2, 4, 1))


_PARTS = {
    "weights": "half of the model (tp 2), in bf16",
    "gradients": "the same in fp32, in which they are summed",
    "optimizer": "masters and two moments in fp32, a share of cp 4 (ZeRO-1)",
    "rounding_buffers": "activations of two layers, whatever the depth",
    "transient": "what a layer's forward or backward takes at the worst moment",
    "context": "CUDA's context, NCCL's buffers and whatever else torch's allocator does not see: assumed",
}


def recipe_parts() -> str:
    """Return the memory of one GPU of the recipe by component."""
    row, choice = row_of("h100x8_1m"), recipe_choice()
    parts = choice["parts_gib"]
    lines = [(name.replace("_", " "), f"{parts[name]:.1f} GiB", _PARTS[name]) for name in _PARTS]
    others = sum(size for name, size in parts.items() if name not in _PARTS)
    lines += [("all else", f"{others:.1f} GiB", "")] if others >= 0.05 else []
    lines.append(("total", f"{choice['total_gib']:.1f} GiB", f"of {row['gpu_memory_gib']:.4g}"))
    host = f"records, for all eight ranks; of {row['host_memory_gib']:,g}"
    lines.append(("host memory of the node", f"{choice['host_gib']:,.0f} GiB", host))
    return markdown(("of one GPU", "foreseen", "is"), lines)


def share_of_step(name: str, resource: str) -> str:
    """Return the share of a step in which a resource is busy, or which one kind of work takes."""
    best = best_of(row_of(name))
    busy = {**best["seconds"], **best["resources"]}[resource]
    return f"{busy / best['step_time_s']:.0%}".replace("%", " %")


def tokens(name: str) -> Callable[[], str]:
    return lambda: f"{row_of(name)['seq_len']:,}"


def in_millions(name: str) -> Callable[[], str]:
    return lambda: million(row_of(name)["seq_len"])


def speed(name: str) -> Callable[[], str]:
    return lambda: f"{best_of(row_of(name))['tgs']:,.0f}"


_part = functools.partial
FIGURES: dict[str, Callable[[], str]] = {
    "plans": _part(
        table,
        _PLAN,
        *("h100x8_512k", "h100x8_1m", "h200x8_512k", "h200x8_1m", "b200x8_1m", "h100x1_1m", "24gib_128k"),
    ),
    "plans_disk": _part(table, _DISK, "h100x8_8m_disk", "h100x1_1m_disk", "24gib_128k_disk"),
    "longest": _part(
        table,
        _LONGEST,
        *("h100x8_longest", "h100x16_longest", "h100x64_longest", "h100x1_longest", "h100x1_longest_256gib"),
        *("24gib_longest", "24gib_longest_1tib", "a800x8_longest", "h100x8_longest_disk", "h100x1_longest_disk"),
    ),
    "largest": _part(
        table,
        _LARGEST,
        *("a100x8_largest_gpt", "a100x8_largest_llama", "h200x1_largest_gpt", "h200x1_largest_llama"),
    ),
    "recipe": recipe,
    "recipe_parts": recipe_parts,
    "recipe_attention": _part(share_of_step, "h100x8_1m", "attention"),
    "recipe_link": _part(share_of_step, "h100x8_1m", "d2h"),
    "attention_512k": _part(share_of_step, "h100x8_512k", "attention"),
    "speed_512k": speed("h100x8_512k"),
    "speed_512k_512gib": speed("h100x8_512k_512gib"),
    "speed_custom": speed("custom_512k"),
    "tokens_at_1000": tokens("h100x8_longest_at_1000"),
    "tokens_1_h100_256gib": tokens("h100x1_longest_256gib"),
    "million_8_h100": in_millions("h100x8_longest"),
    "million_8_h100_alst": in_millions("h100x8_longest_alst"),
    "million_1_h100": in_millions("h100x1_longest"),
    "sequence_8_h100": lambda: period(sequence_s(row_of("h100x8_longest"))),
    "billion_8_h100": lambda: period(billion_s(row_of("h100x8_longest"))),
}
