"""Tables of values that memo foresees, beside measurements by others."""

from page_tables import Row, Table, grouped, is_kind, number, text


def is_of_published_table(row: Row) -> bool:
    """Return whether a row of simulator_accuracy.jsonl is about a published table, with memo's own efficiencies."""
    return "mean_error_percent" in row and "family" not in row


def regret(row: Row) -> str:
    found = row.get("regret_percent")
    return "-" if not found else ", ".join(f"{gpus}: {percent:.1f}" for gpus, percent in found.items())


def marks(lines: list[Row]) -> list[Row]:
    """Return for each source how many of the paper's marks each account reproduces."""
    return [
        {
            "source": source,
            "rows": len(own),
            "paper": sum(row["paper_system"] == row["printed"] for row in own),
            "memo": sum(row["memo"] == row["printed"] for row in own),
            "fits": sum(row["memo"] == "ok" and row["printed"] != "ok" for row in own),
        }
        for (source,), own in grouped(lines, "source").items()
    ]


SWEPT = {
    "model": text("model"),
    "GPUs": lambda row: f"{row['gpus']} x {row['hardware']}",
    "tokens": number("seq_length", ",d"),
    "layers": number("layers", "d"),
    "tiles": number("tiles", "d"),
    "tiles in a slot": number("slot_tiles", "d"),
    "step with whole layers, s": number("whole_layers_s", ",.2f"),
    "step with swept layers, s": number("swept_s", ",.2f"),
    "ratio": number("ratio", ".3f"),
}


def prime_work(row: Row) -> str:
    """Return the kind of work of a step of prime-rl, with its settings."""
    said = {
        ", LoRA": row["lora"],
        ", FlashAttention 2": row["attention"] == "flash_attention_2",
        ", inputs of layers in host memory": not row["recomputes"],
    }
    return row["work"] + "".join(name for name, applies in said.items() if applies)


FORESEEN = [
    Table(
        "simulator_accuracy",
        "The simulator against published runs",
        {
            "table": text("table"),
            "runs": number("rows", "d"),
            "mean error, %": number("mean_error_percent", ".1f"),
            "bias, %": number("bias_percent", "+.1f"),
            "worst, %": number("worst_percent", "+.1f"),
            "mean ±% that memo prints": number("mean_bar_percent", ".1f"),
            "runs within their ±%": number("within_their_bars", "d"),
            "first choice slower than the best, %, by number of GPUs": regret,
        },
        is_of_published_table,
        text="p4d 3 and p4d 4 are tables of the 4D paper: Megatron-LM on A100 and H100. memo 3 and memo 4 are tables "
        "of MEMO's paper, on A800. memo's efficiencies are fitted to these runs (docs/estimators.md).",
    ),
    Table(
        "held_out_accuracy",
        "The simulator against steps to which nothing was fitted",
        {
            "runs": text("source"),
            "model": text("model"),
            "layers": number("layers", "d"),
            "tokens": number("seq_length", ",d"),
            "tp, cp, pp": lambda row: ", ".join(map(str, row["tp_cp_pp"])),
            "sequences a step": number("sequences", "d"),
            "measured step, s": number("step_s", ",.2f"),
            "error of memo's step": number("error", "+.1%"),
            "± that memo prints": number("bar", ".0%"),
            "error of SimuMax's step": number("other_error", "+.1%"),
            "error of memo's memory": number("memory_error", "+.1%"),
            "error of SimuMax's memory": number("other_memory_error", "+.1%"),
        },
        lambda row: "summary" not in row,
        text="SimuMax measured these runs of Megatron-LM on 8 B200. Nothing was fitted to the steps, but memo is "
        "biased on B200: it foresees nearly all steps as too short. Memory is the peak of torch's allocator. It is not "
        "held out: the tensors that fused kernels keep were found by looking at these runs (docs/estimators.md).",
    ),
    Table(
        "step_sources",
        "The simulator against steps of prime-rl",
        {
            "GPUs": lambda row: f"{row['gpus']} x {row['hardware']}",
            "model": text("model"),
            "work": prime_work,
            "tokens": number("seq_length", ",d"),
            "measured step, s": number("step_s", ".2f"),
            "between steps, s": number("between_s", ".2f"),
            "work that memo does not do, s": number("not_memos_s", ".2f"),
            "foreseen, s": number("foreseen_s", ".2f"),
            "longer than foreseen": number("longer", "+.0%"),
            "longer than foreseen without this work": number("longer_of_memos", "+.0%"),
            "± that memo prints": number("bar", ".0%"),
        },
        is_kind("step"),
        text="rl is reinforcement learning, and sft is supervised fine-tuning. memo does not do the following work of "
        "a step: the additional work of an RL run, logits of the whole sequence in fp32, and four adapters a matrix "
        "under LoRA (benchmarks/step_sources.py). Without this work the small model still takes some 0.2 s a step "
        "longer than foreseen, whatever its length (docs/estimators.md). The efficiency of FlashAttention 2 on B200 "
        "was fitted to the two steps without LoRA there. The efficiency of attention on Hopper was chosen by memo's "
        "own steps on one H200, not by these steps.",
    ),
    Table(
        "step_sources",
        "Errors on each source with efficiencies from other sources",
        {
            "source": text("source"),
            "runs": number("runs", "d"),
            "efficiencies from": text("by"),
            "mean error": number("mean", ".1%"),
            "worst error": number("worst", "+.0%"),
        },
        is_kind("left out"),
        text="The efficiencies of a row are fitted or chosen without the runs of its source. cuDNN alone: attention is "
        "as fast in a step as cuDNN's kernels run alone.",
    ),
    Table(
        "paper_marks",
        "Marks of MEMO's paper: runs that fit, and runs that do not",
        {
            "source": text("source"),
            "runs": number("rows", "d"),
            "marks that the account of the paper's system reproduces": number("paper", "d"),
            "marks that memo's own account reproduces": number("memo", "d"),
            "runs that fit in memo only": number("fits", "d"),
        },
        of=marks,
        text="The paper prints for each run whether it fits, or runs out of GPU memory or host memory. "
        "full_recompute+plan and full_swap+plan are rows of its table 4.",
    ),
    Table("sweep_speed", "Swept and whole layers", SWEPT, is_kind("foreseen")),
    Table(
        "foreseen_plans",
        "Plans that the README and the guide quote",
        {
            "memo plan": lambda row: f"`{row['arguments']}`",
            "tokens": number("seq_len", ",d"),
            "tokens/GPU/s": lambda row: f"{row['choices'][0]['tgs']:,.1f}",
            "step, s": lambda row: f"{row['choices'][0]['step_time_s']:,.1f}",
            "GPU memory, GiB": lambda row: f"{row['choices'][0]['total_gib']:.2f}",
            "host memory of a node, GiB": lambda row: f"{row['choices'][0]['host_gib']:,.0f}",
        },
    ),
]
