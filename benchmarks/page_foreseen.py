"""Tables of what memo foresees, beside what others measured."""

from page_tables import Row, Table, grouped, is_kind, number, text


def is_of_published_table(row: Row) -> bool:
    """Of simulator_accuracy.jsonl: a row for each table of published runs, with the efficiencies as they are."""
    return "mean_error_percent" in row and "family" not in row


def regret(row: Row) -> str:
    found = row.get("regret_percent")
    return "-" if not found else ", ".join(f"{gpus}: {percent:.1f}" for gpus, percent in found.items())


def marks(lines: list[Row]) -> list[Row]:
    """Of the paper's marks: how many memo's own account gives as printed."""
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
    "s": number("seq_length", ",d"),
    "layers": number("layers", "d"),
    "tiles": number("tiles", "d"),
    "in a slot": number("slot_tiles", "d"),
    "whole layers, s": number("whole_layers_s", ",.2f"),
    "swept, s": number("swept_s", ",.2f"),
    "ratio": number("ratio", ".3f"),
}


def prime_work(row: Row) -> str:
    """Of a step of prime-rl: what is trained and how."""
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
            "±% that memo prints, mean": number("mean_bar_percent", ".1f"),
            "runs within it": number("within_their_bars", "d"),
            "first choice slower than the best by %, by GPUs": regret,
        },
        is_of_published_table,
        text="p4d 3 and 4: Megatron-LM on A100 and H100; memo 3: the paper's table of A800. Efficiencies are fitted to "
        "these runs (docs/estimators.md).",
    ),
    Table(
        "held_out_accuracy",
        "The simulator against steps to which nothing was fitted",
        {
            "runs": text("source"),
            "model": text("model"),
            "layers": number("layers", "d"),
            "s": number("seq_length", ",d"),
            "tp, cp, pp": lambda row: ", ".join(map(str, row["tp_cp_pp"])),
            "sequences a step": number("sequences", "d"),
            "measured, s": number("step_s", ",.2f"),
            "memo's step off by": number("error", "+.1%"),
            "±": number("bar", ".0%"),
            "SimuMax's": number("other_error", "+.1%"),
            "memory off by": number("memory_error", "+.1%"),
            "SimuMax's memory": number("other_memory_error", "+.1%"),
        },
        lambda row: "summary" not in row,
        text="Megatron-LM on 8 B200 as SimuMax measured it. Nothing was fitted to these steps, but memo is biased on "
        "B200: nearly all are foreseen too short. Memory, the most that torch's allocator gave, is not held out: what "
        "fused kernels keep was found by looking at these runs (docs/estimators.md).",
    ),
    Table(
        "step_sources",
        "The simulator against steps of prime-rl",
        {
            "on": lambda row: f"{row['gpus']} x {row['hardware']}",
            "model": text("model"),
            "work": prime_work,
            "s": number("seq_length", ",d"),
            "measured, s": number("step_s", ".2f"),
            "between steps, s": number("between_s", ".2f"),
            "not memo's, s": number("not_memos_s", ".2f"),
            "foreseen, s": number("foreseen_s", ".2f"),
            "longer than foreseen": number("longer", "+.0%"),
            "without what is not memo's": number("longer_of_memos", "+.0%"),
            "±": number("bar", ".0%"),
        },
        is_kind("step"),
        text="Fitted: FlashAttention 2 on B200, to the two steps without LoRA there. Not memo's: what an RL run does "
        "beyond a supervised one, logits of the whole sequence in fp32, and four adapters a matrix under LoRA "
        "(benchmarks/step_sources.py). What is left of the small model is some 0.2 s a step, whatever its length "
        "(docs/estimators.md). Attention of Hopper was chosen by memo's own steps on one H200, not by these.",
    ),
    Table(
        "step_sources",
        "Each source left out of what is chosen or fitted",
        {
            "source": text("source"),
            "runs": number("runs", "d"),
            "foreseen by": text("by"),
            "mean error": number("mean", ".1%"),
            "worst": number("worst", "+.0%"),
        },
        is_kind("left out"),
    ),
    Table(
        "paper_marks",
        "Marks of the paper: what fits, what does not",
        {
            "from": text("source"),
            "runs": number("rows", "d"),
            "the account of the paper's system as printed": number("paper", "d"),
            "memo's own as printed": number("memo", "d"),
            "memo fits where the paper did not": number("fits", "d"),
        },
        of=marks,
    ),
    Table("sweep_speed", "Swept layers against whole ones", SWEPT, is_kind("foreseen")),
    Table(
        "foreseen_plans",
        "Plans that the README and the guide quote",
        {
            "memo plan": lambda row: f"`{row['arguments']}`",
            "tokens": number("seq_len", ",d"),
            "tokens/GPU/s": lambda row: f"{row['choices'][0]['tgs']:,.1f}",
            "a step, s": lambda row: f"{row['choices'][0]['step_time_s']:,.1f}",
            "GPU, GiB": lambda row: f"{row['choices'][0]['total_gib']:.2f}",
            "host, GiB": lambda row: f"{row['choices'][0]['host_gib']:,.0f}",
        },
    ),
]
