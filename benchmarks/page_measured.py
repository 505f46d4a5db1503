"""Tables of measurements on CPUs and on the emulated GPU."""

import statistics

from page_foreseen import SWEPT
from page_gpu import TABLES
from page_scaled import mib
from page_tables import Row, Table, grouped, is_kind, number, text

from memo.units import GIB


def allocators(lines: list[Row]) -> list[Row]:
    """Return a row for each run: memory in use at its peak, and memory that each allocator reserves for it."""
    found = []
    for (name,), own in grouped(lines, "name").items():
        reserved = {row["allocator"]: row["reserved_bytes"] / GIB for row in own}
        found.append({"name": name, "in_use": own[-1]["allocated_bytes"] / GIB, **reserved})
    return found


def campaigns(lines: list[Row]) -> list[Row]:
    """Return one row with the sums over all flows."""
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
    """Return the iterations of memory_planner.jsonl by planner."""
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
    """Return one row for each machine and length, with the median and the largest MFU of its runs."""
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
        "Peak memory of a step, foreseen and measured",
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
        "Device memory by length of the sequence, with whole and with swept layers",
        {
            "layers": text("granularity"),
            "tokens": number("seq_length", ",d"),
            "measured, MiB": mib("measured_bytes"),
            "foreseen, MiB": mib("foreseen_bytes"),
            "bytes for each further token": number("growth_bytes_a_token", ",.1f"),
            "in sizes of keys, values and their gradients": number("over_keys_and_values", ".3f"),
        },
        text="layer: whole layers. tile: layers swept along the sequence. hidden: swept layers with hidden states in "
        "host memory. The last two columns tell by how much a longer sequence needs more memory.",
    ),
    Table(
        "quarter_million",
        "One step of 262,144 tokens in 104 MiB of device memory",
        {
            "layers": text("way"),
            "tokens": number("seq_length", ",d"),
            "loss": number("lm_loss", ".15f"),
            "norm of the gradient": number("grad_norm", ".17f"),
            "rounding buffers, MiB": mib("rounding_buffers_bytes"),
            "host records, MiB": mib("host_records_bytes"),
            "step, s": number("step_time_s", ".0f"),
            "refusal": text("message"),
        },
    ),
    Table(
        "memory_iterations",
        "Memory plans of training iterations, GiB",
        {
            "model": text("model"),
            "iteration": text("what"),
            "requests": number("requests", ",d"),
            "least possible": number("bound_gib", ".2f"),
            "planned": number("planned_gib", ".2f"),
            "proof": text("proof"),
            "torch's caching allocator": number("default_gib", ".2f"),
            "expandable segments": number("expandable_gib", ".2f"),
            "planning, s": number("plan_s", ".1f"),
        },
        text="The planner gets the requests of an iteration to the allocator. The figures of torch's two allocators "
        "come from a replay of the same requests.",
    ),
    Table(
        "memory_planner",
        "Memory planners on synthetic iterations",
        {
            "planner": text("planner"),
            "iterations": number("iterations", "d"),
            "worst peak over the bound": number("worst", ".3f"),
            "proved optimal": number("optimal", "d"),
            "longest planning, s": number("planning_s", ".2f"),
        },
        lambda row: "layers_x_microbatches" in row,
        planners,
        text="The bound is the most memory that is in use at one time: no plan can have a lower peak.",
    ),
    Table(
        "scaled_longest",
        "Longest sequence in 134 MiB, on the scaled node's model",
        {
            "way": text("way"),
            "tokens": number("seq_length", ",d"),
            "peak, MiB": mib("peak_bytes"),
            "bytes a token": number("bytes_a_token", ",.0f"),
            "bytes a token, in sizes of a layer's input": number("in_input_sizes", ".1f"),
        },
        of=lambda lines: sorted(lines, key=lambda row: row["seq_length"]),
        text="whole-layers and whole-layers-recompute are torch's layers under autograd; all other ways compute on "
        "tiles of tokens, as on the scaled node above. memo-least keeps only the input and the attention output of a "
        "layer for backward, in host memory. memo-swept sweeps layers along the sequence, with hidden states in host "
        "memory.",
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
            "disk reads, GB/s": number("disk_read_gb_per_s", ".2f"),
            "bare disk, s": number("disk_s", ".2f"),
            "records of a step, s": number("step_s", ".2f"),
            "speed over the bare disk": number("ratio", ".2f"),
        },
        text="A step of the swap engine offloads all records to a disk and brings them back, without compute. The bare "
        "disk writes and reads as many bytes in order.",
    ),
    Table(
        "ingestion",
        "Speed of tokenization",
        {
            "way": text("way"),
            "MiB of texts": number("text_mib", ".0f"),
            "cores": text("cores"),
            "seconds": number("seconds", ".1f"),
            "MiB a second": number("mib_per_s", ".2f"),
            "speed over `tokenizers` alone": number("ratio", ".2f"),
            "load by other processes": number("load", ".1f"),
        },
        text="`tokenizers` encodes texts that are in memory, and discards the result. `memo data build` reads a file "
        "and writes a corpus; `datasets` reads a file too.",
    ),
    Table(
        "checkpoint_checksums",
        "Time that checksums add to a checkpoint",
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
            "run (tp 8 unless a layout is named)": text("name"),
            "in use at the peak": number("in_use", ".2f"),
            "reserved by torch's allocator": number("default", ".2f"),
            "reserved with expandable segments": number("expandable_segments", ".2f"),
            "reserved by memo's plan": number("planned", ".2f"),
        },
        of=allocators,
    ),
    Table(
        "emulated_schedules",
        "Results under other orders of streams",
        {
            "flows": number("flows", "d"),
            "schedules": number("schedules", ",d"),
            "wrong results": number("faults", "d"),
        },
        of=schedules,
        text="A flow is one kind of run. Each flow ran under many schedules, which are orders in which its streams may "
        "run. Every schedule gave the same bits.",
    ),
    Table(
        "lost_orders",
        "Results without single waits and events",
        {
            "flows": number("flows", "d"),
            "waits and events removed": number("orders", ",d"),
            "error found": number("caught", ",d"),
            "redundant": number("redundant", ",d"),
            "needless": number("needless", "d"),
        },
        of=campaigns,
        text="Each wait and event of the program was left out once, and each copy was put on another stream, to see "
        "whether a test finds the error. Redundant: other waits enforce the same order. Needless: without the wait no "
        "two accesses conflict in this run.",
    ),
    Table("sweep_speed", "Swept and whole layers, modelled time", SWEPT, is_kind("rehearsed")),
    Table(
        "timed_accuracy",
        "MFU of full-size programs, modelled time",
        {
            "hardware": text("hardware"),
            "tokens": number("seq_length", ",d"),
            "runs": number("rows", "d"),
            "MFU causal, median, %": number("mfu", ".1f"),
            "largest MFU, %": number("most", ".1f"),
        },
        of=timed,
        text="One rank of tp 8. The times of kernels are those of memo's model of the machine.",
    ),
]
