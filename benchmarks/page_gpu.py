"""Tables of what `make gpu` and `make benchmark --scale full` measure on a GPU."""

from gpu_accuracy import beside_foresight
from page_tables import Cell, Table, both_ways, gib, moved, number, status, text, thousandth

_RUN: dict[str, Cell] = {
    "tokens": number("seq_length", ",d"),
    "way": text("way"),
    "status": status,
    "step, s": number("step_p50_s", ".3f"),
    "quickest - slowest": lambda row: (
        f"{row['step_p0_s']:.3f} - {row['step_p100_s']:.3f}" if "step_p0_s" in row else "-"
    ),
    "tokens/s": number("tgs", ",.0f"),
}
_MFU: dict[str, Cell] = {
    "MFU causal, %": number("mfu_causal_percent", ".1f"),
    "MFU full, %": number("mfu_full_percent", ".1f"),
}
_MEMORY: dict[str, Cell] = {
    "GPU GiB": gib("allocated_peak_bytes"),
    "reserved": gib("reserved_peak_bytes"),
    "host GiB, activations": gib("host_records_bytes"),
    "host GiB, process": gib("host_peak_bytes"),
}

TABLES: dict[str, tuple[str, dict[str, Cell]]] = {
    # file: (title, columns)
    "table3_end_to_end": (
        "End to end: one rank, by sequence length",
        {
            **_RUN,
            **_MFU,
            **_MEMORY,
            "moved": moved,
            "hidden": number("hidden_share", ".3f"),
            "of the ideal's speed": number("share_of_ideal_speed", ".3f"),
            "ideal": text("ideal_is"),
            "over full recompute": number("speed_over_full-recompute", ".2f"),
            "over layer-input offload": number("speed_over_layer-input-offload", ".2f"),
        },
    ),
    "table4_ablation": (
        "Ablation",
        {**_RUN, **_MFU, **_MEMORY, "moved": moved, "over full recompute": number("speed_over_full-recompute", ".2f")},
    ),
    "copies": (
        "Copies of one layer's record, GB/s: offload / prefetch",
        {
            "tokens": _RUN["tokens"],
            "alpha": number("alpha", "g"),
            "record, GiB": gib("record_bytes"),
            "status": status,
            "alone": both_ways("alone"),
            "both at once": both_ways("alone_both"),
            "under compute": both_ways("compute"),
            "both under compute": both_ways("compute_both"),
            "compute takes": number("compute_slowed_by_both", ".2f"),
        },
    ),
    "overlap": (
        "Overlap of copies and compute",
        {
            **{name: _RUN[name] for name in ("tokens", "way", "status", "step, s")},
            "alpha": number("alpha", "g"),
            "layers, s": number("layers_s", ".4f"),
            "copies, s": number("copies_s", ".4f"),
            "waiting, s": number("copy_wait_s", ".4f"),
            "hidden": number("hidden_share", ".3f"),
            "foreseen": lambda row: f"{row['forecast']['hidden_share']:.3f}" if row.get("forecast") else "-",
        },
    ),
    "reach": (
        "Reach: the longest sequence of a whole model",
        {"model": text("model"), "row": text("kind"), **_RUN, **_MEMORY},
    ),
    "allocator": (
        "Allocators",
        {
            "allocator": text("allocator"),
            **{name: _RUN[name] for name in ("tokens", "status", "step, s")},
            **_MEMORY,
            "reserved / in use": number("reserved_over_allocated", ".3f"),
            "device mallocs a step": number("device_mallocs_per_step", "g"),
            "arena": gib("planned_arena_bytes"),
            "planned peak": gib("planned_peak_bytes"),
            "fallbacks": text("fallbacks"),
        },
    ),
    "peers": (
        "Peers: whole model, one device",
        {**_RUN, **_MEMORY, "memo's speed over it": number("memo_speed_over_it", ".2f")},
    ),
    "kernels": (
        "Kernels: memo's on Triton, and the time of other kernels divided by memo's",
        {
            "operation": text("op"),
            "shape": text("shape"),
            "status": status,
            "forward, ms": thousandth("forward_s"),
            "GB/s": number("forward_gb_per_s", ",.0f"),
            "backward, ms": thousandth("backward_s"),
            "GB/s, backward": number("backward_gb_per_s", ",.0f"),
            **{
                f"{label}, {part}": number(f"{part}_over_{name}", ".2f")
                for name, label in (("torch", "torch"), ("compile", "torch.compile"), ("liger", "Liger"))
                for part in ("forward", "both")
            },
        },
    ),
    "offload_states": (
        "States in host memory: whole model, one device",
        {
            "model": text("model"),
            "row": text("kind"),
            **_RUN,
            **_MEMORY,
            "copies of states, s": number("state_copies_s", ".3f"),
            "waiting for them, s": number("state_wait_s", ".3f"),
            "CPU update, s": number("host_update_s", ".3f"),
            "memo's speed over it": number("memo_speed_over_it", ".2f"),
        },
    ),
    "convergence": (
        "Losses with and without swapping",
        {
            "run": text("run"),
            "dtype": text("dtype"),
            "tokens": number("seq_length", ",d"),
            "steps": lambda row: str(len(row["losses"])),
            "last loss": lambda row: f"{row['losses'][-1]:.6f}",
            "largest difference among alphas": number("max_difference_among_alphas", "g"),
            "largest difference from no swapping": number("max_difference_from_plain", "g"),
        },
    ),
}

FORESIGHT = Table(
    "full/gpu_accuracy",
    "Steps, measured and foreseen",
    {
        "run": text("name"),
        "status": lambda row: "-" if row["status"] == "ok" else status(row),
        "tokens/s": _RUN["tokens/s"],
        "MFU causal, %": _MFU["MFU causal, %"],
        "step, s": number("step_p50_s", ".3f"),
        "step foreseen, s": number("foreseen_s", ".3f"),
        "error of the foreseen step, %": number("time_off_percent", "+.1f"),
        "share of the ideal's speed": number("of_ideal", ".3f"),
        "copies hidden": number("hidden_share", ".3f"),
        "GPU GiB": gib("allocated_peak_bytes"),
        "error of the foreseen GiB, %": number("memory_off_percent", "+.2f"),
        "error of the emulated GiB, %": lambda row: (
            "-"
            if not row.get("emulated_bytes")
            else f"{100 * (row['emulated_bytes'] / row['allocated_peak_bytes'] - 1):+.3f}"
        ),
        "reserved": gib("reserved_peak_bytes"),
        "host GiB, activations": gib("host_records_bytes"),
    },
    of=beside_foresight,
    text="One GPU, alone on its host. The ideal (none) keeps everything on the device. Errors compare the foreseen "
    "value with the measured one. The foreseen time counts no messages, because a rank that runs alone sends none. "
    "Memory is the peak of torch's allocator; the emulated GiB are those of the same program on the emulated GPU.",
)

ON_GPU = [FORESIGHT, *(Table(f"full/{name}", title, columns) for name, (title, columns) in TABLES.items())]
