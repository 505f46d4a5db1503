"""Tables of what was measured on CPUs and on the emulated GPU."""

import statistics

from page_foreseen import SWEPT
from page_gpu import TABLES
from page_scaled import mib
from page_tables import Row, Table, grouped, is_kind, number, text

from memo.units import GIB


def allocators(lines: list[Row]) -> list[Row]:
    """A row for each run: what is in use at its peak, and what each allocator reserves for that."""
    found = []
    for (name,), own in grouped(lines, "name").items():
        reserved = {row["allocator"]: row["reserved_bytes"] / GIB for row in own}
        found.append({"name": name, "in_use": own[-1]["allocated_bytes"] / GIB, **reserved})
    return found


def campaigns(lines: list[Row]) -> list[Row]:
    """The sum over all flows."""
    return [{"flows": len(lines), **{name: sum(row[name] for row in lines) for name in _ORDERS}}]


_ORDERS = ("orders", "caught", "redundant", "needless")


def schedules(lines: list[Row]) -> list[Row]:
    faults = sum(len(row["faults"]) for row in lines)
    return [{"flows": len(lines), "schedules": sum(row["schedules"] for row in lines), "faults": faults}]


def kills(lines: list[Row]) -> list[Row]:
    return [
        {
            "fault": fault,
            "runs": len(own),
            "good": sum(row["is_good"] for row in own),
            "same_bits": sum(bool(row["same_bits"]) for row in own),
            "gone_s": max(row["gone_s"] for row in own),
        }
        for (fault,), own in grouped(lines, "fault").items()
    ]


def planners(lines: list[Row]) -> list[Row]:
    """Of memory_planner.jsonl: iterations of training by planner."""
    return [
        {
            "planner": planner,
            "iterations": len(rows),
            "worst": max(row["peak_over_bound"] for row in rows),
            "optimal": sum(row["proof"] == "optimal" for row in rows),
            "planning_s": max(row["planning_s"] for row in rows),
        }
        for (planner,), rows in grouped(lines, "planner").items()
    ]


def timed(lines: list[Row]) -> list[Row]:
    """The median of each machine and length suffices: the page is for people."""
    return [
        {
            "hardware": hardware,
            "seq_length": seq_length,
            "rows": len(own),
            "mfu": statistics.median(row["mfu_percent"] for row in own),
            "most": max(row["mfu_percent"] for row in own),
        }
        for (hardware, seq_length), own in grouped(lines, "hardware", "seq_length").items()
    ]


ON_CPU = [
    Table(
        "memory_accuracy",
        "Peak memory of a step: foreseen beside measured",
        {
            "configuration": text("name"),
            "ranks": number("ranks", "d"),
            "stage": number("stage", "d"),
            "measured, MiB": mib("measured_bytes"),
            "foreseen, MiB": mib("predicted_bytes"),
            "error": number("error", "+.3%"),
        },
    ),
    Table(
        "sweep_memory",
        "Device memory by length of the sequence, layers whole and swept",
        {
            "layers": text("granularity"),
            "s": number("seq_length", ",d"),
            "measured, MiB": mib("measured_bytes"),
            "foreseen, MiB": mib("foreseen_bytes"),
            "bytes for each further token": number("growth_bytes_a_token", ",.1f"),
            "of keys, values and their gradients": number("over_keys_and_values", ".3f"),
        },
    ),
    Table(
        "quarter_million",
        "One step of 262,144 tokens in 104 MiB of device memory",
        {
            "layers": text("way"),
            "s": number("seq_length", ",d"),
            "loss": number("lm_loss", ".15f"),
            "norm of the gradient": number("grad_norm", ".17f"),
            "slots, MiB": mib("rounding_buffers_bytes"),
            "host records, MiB": mib("host_records_bytes"),
            "step, s": number("step_time_s", ".0f"),
            "refusal": text("message"),
        },
    ),
    Table(
        "memory_iterations",
        "Memory plans of iterations, GiB",
        {
            "model": text("model"),
            "iteration": text("what"),
            "requests": number("requests", ",d"),
            "least possible": number("bound_gib", ".2f"),
            "planned": number("planned_gib", ".2f"),
            "proof": text("proof"),
            "caching allocator": number("default_gib", ".2f"),
            "expandable segments": number("expandable_gib", ".2f"),
            "planning, s": number("plan_s", ".1f"),
        },
        text="What the two other allocators would reserve comes from replaying the same requests.",
    ),
    Table(
        "memory_planner",
        "Planners",
        {
            "planner": text("planner"),
            "iterations": number("iterations", "d"),
            "worst peak over the bound": number("worst", ".3f"),
            "proved optimal": number("optimal", "d"),
            "longest planning, s": number("planning_s", ".2f"),
        },
        lambda row: "layers_x_microbatches" in row,
        planners,
    ),
    Table(
        "scaled_longest",
        "Longest sequence in 134 MiB, on the scaled node's model",
        {
            "way": text("way"),
            "tokens": number("seq_length", ",d"),
            "peak, MiB": mib("peak_bytes"),
            "bytes a token": number("bytes_a_token", ",.0f"),
            "in sizes of a layer's input": number("in_input_sizes", ".1f"),
        },
        of=lambda lines: sorted(lines, key=lambda row: row["seq_length"]),
        text="whole-layers are torch's layers under autograd; all other ways compute on tiles of tokens, as on the "
        "scaled node, above. memo-least keeps nothing but a layer's input and attention's output for backward, in host "
        "memory; memo-swept sweeps layers along the sequence, with hidden states in host memory.",
    ),
    Table("swap_convergence", *TABLES["convergence"]),
    Table(
        "kill_campaign",
        "Ranks that are killed, hang or fail",
        {
            "fault": text("fault"),
            "runs": number("runs", "d"),
            "ended as they should": number("good", "d"),
            "resumed with the same bits": number("same_bits", "d"),
            "longest until all ranks were gone, s": number("gone_s", ".1f"),
        },
        of=kills,
    ),
    Table(
        "disk_records",
        "Records on a disk against the disk's own rate",
        {
            "disk writes, GB/s": number("disk_write_gb_per_s", ".2f"),
            "reads, GB/s": number("disk_read_gb_per_s", ".2f"),
            "bare disk, s": number("disk_s", ".2f"),
            "records, s": number("step_s", ".2f"),
            "speed over the bare disk": number("ratio", ".2f"),
        },
    ),
    Table(
        "ingestion",
        "Texts to tokens",
        {
            "way": text("way"),
            "MiB of texts": number("text_mib", ".0f"),
            "cores": text("cores"),
            "s": number("seconds", ".1f"),
            "MiB a second": number("mib_per_s", ".2f"),
            "speed over `tokenizers` alone": number("ratio", ".2f"),
            "load by others": number("load", ".1f"),
        },
    ),
    Table(
        "checkpoint_checksums",
        "What checksums cost a checkpoint",
        {
            "save, s": number("save_s", ".2f"),
            "added to a save, %": number("added_to_save_percent", "+.1f"),
            "load, s": number("load_s", ".2f"),
            "added to a load, %": number("added_to_load_percent", "+.1f"),
        },
    ),
]

EMULATED = [
    Table(
        "full_size",
        "Memory that is reserved for full-size runs, GiB a rank",
        {
            "run (tp 8 where no layout is named)": text("name"),
            "in use at the peak": number("in_use", ".2f"),
            "torch's allocator": number("default", ".2f"),
            "expandable segments": number("expandable_segments", ".2f"),
            "memo's plan": number("planned", ".2f"),
        },
        of=allocators,
    ),
    Table(
        "emulated_schedules",
        "Orders in which streams may run",
        {
            "flows": number("flows", "d"),
            "schedules": number("schedules", ",d"),
            "wrong results": number("faults", "d"),
        },
        of=schedules,
        text="Every schedule gave the same bits.",
    ),
    Table(
        "lost_orders",
        "Orders that were taken away",
        {
            "flows": number("flows", "d"),
            "waits and events removed": number("orders", ",d"),
            "the result told": number("caught", ",d"),
            "another order says the same": number("redundant", ",d"),
            "needless": number("needless", "d"),
        },
        of=campaigns,
        text="Each event, wait and copy of the program was left out once, to see that a test would notice.",
    ),
    Table("sweep_speed", "Swept layers against whole ones, modelled time", SWEPT, is_kind("rehearsed")),
    Table(
        "timed_accuracy",
        "MFU of full-size programs, modelled time",
        {
            "on": text("hardware"),
            "s": number("seq_length", ",d"),
            "runs": number("rows", "d"),
            "MFU, median": number("mfu", ".1f"),
            "most": number("most", ".1f"),
        },
        of=timed,
        text="One rank of tp 8; kernels take what the model of the machine says.",
    ),
]
