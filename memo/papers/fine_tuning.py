"""`memo plan --method llmem`: LLMem's choice of a method of fine-tuning (Algorithm 1), as text and as JSON."""

from typing import Any

from memo.papers.llmem import BASE_BYTES, Selection, Setting, peak, select
from memo.search.question import Question
from memo.text_table import text_table
from memo.units import GIB

LIMITS = (
    "The paper's formulas, for Colossal-AI with checkpointing; it prints errors of up to 3 % on several V100s. The "
    "score counts sequences at once and simulates no time; what the process takes before the model, which the paper "
    f"measures, is taken as {BASE_BYTES / GIB:.2f} GiB."
)


def choose_method(question: Question, corrected: bool) -> tuple[Setting, Selection]:
    """Algorithm 1 for the question's model, GPUs and length; `corrected`: see `Setting`."""
    setting = Setting(question.model.shape, question.seq_len, question.gpus, corrected=corrected)
    return setting, select(setting, question.gpu_memory_gib * GIB)


def as_object(question: Question, setting: Setting, found: Selection) -> dict[str, Any]:
    """The answer for JSON; sizes in GiB. Batches are sequences of one data-parallel rank."""
    return {
        "model": question.model.name,
        "gpus": question.gpus,
        "hardware": question.hardware.name,
        "gpu_memory_gib": question.gpu_memory_gib,
        "seq_len": question.seq_len,
        "corrected": setting.corrected,
        "choice": str(found.choice),
        "batch": found.batch,
        "methods": {
            str(method): {
                "batch": batch,
                "score": found.scores[method],
                "gpu_gib": peak(setting, method, max(1, batch)).total_bytes / GIB,
            }
            for method, batch in found.batches.items()
        },
    }


def text(question: Question, setting: Setting, found: Selection) -> str:
    """A row for each method, the choice, and the known errors."""
    shown = as_object(question, setting, found)
    rows = [("method", "largest batch", "score", "GPU GiB")]
    for name, row in shown["methods"].items():
        rows.append((name, f"{row['batch']:,}", f"{row['score']:,g}", f"{row['gpu_gib']:.2f}"))
    chosen = f"chosen: {found.choice}"
    if found.batch:
        chosen += f", {found.batch:,} sequences a data-parallel rank"
    else:
        chosen += ": one sequence does not fit by any method (GPU GiB is what one takes)"
    formulas = "corrected formulas" if setting.corrected else "literal formulas"
    title = (
        f"{question.model.name} on {question.gpus} x {question.hardware.name} ({question.gpu_memory_gib:g} GiB), "
        f"{question.seq_len:,} tokens: LLMem's Algorithm 1, {formulas}"
    )
    return "\n".join([title, "", text_table(rows), "", chosen, LIMITS])
