"""Compares the best plans of one job on several machines, or for several ways to train, by price or by speed."""

import re
from collections.abc import Sequence
from typing import Any

from memo.errors import ConfigError
from memo.search.axis import shortage_of
from memo.search.costs import assumed_node, billion_tokens_s, dollars_text, duration
from memo.search.plan import Choice, Plan, cells_of, speed_error
from memo.search.question import Question, ask
from memo.search.ranking import search
from memo.text_table import text_table

_HEADS = (
    *("", "machine", "layout", "dp", "activations", "tokens/s", "tok/GPU/s", "±%", "MFU %", "step s"),
    *("a billion tokens", "$/h", "$/B tokens"),
)
_SPARE = ("dp", "MFU %", "step s", "tok/GPU/s", "$/h", "±%", "a billion tokens")
"""Columns that a narrow terminal does not show; they are dropped in this order."""
_MACHINE = re.compile(r"(?P<name>.+)x(?P<gpus>\d{1,9})(?:@(?P<price>\d+(?:\.\d*)?))?", re.ASCII)


def parse_machines(text: str) -> list[dict[str, Any]]:
    """Parse machines such as `h100-80x8@2.5,mine.tomlx4`, as arguments of `memo.search.question.ask`. Raises
    ConfigError."""
    machines = []
    for part in text.split(","):
        found = _MACHINE.fullmatch(part.strip())
        if found is None or not int(found["gpus"]):
            raise ConfigError(
                f"--compare {text}: {part.strip()!r} is no machine with its number of GPUs: write NAMExGPUS,NAMExGPUS, "
                "such as h100-80x8,h200x8, each with @ and the dollars of a GPU and hour where you know them, such as "
                "h100-80x8@2.5"
            )
        price = {} if found["price"] is None else {"price_per_gpu_hour": float(found["price"])}
        machines.append({"hardware": found["name"], "gpus": int(found["gpus"]), **price})
    return machines


def compare(model: str, machines: Sequence[dict[str, Any]], global_batch_size: int | None, **asked: Any) -> list[Plan]:
    """Return the best plan on each of the machines that `parse_machines` returned, the cheapest first.

    Machines with a price come first, by dollars for a token; then machines without a price, by tokens a second; then
    machines on which nothing fits.

    Args:
        global_batch_size: of all machines; default: a sequence for each GPU of the largest machine.
        asked: further arguments of `memo.search.question.ask`; its price is for machines without one of their own.

    Raises the errors of `memo.search.question.ask`.
    """
    batch = global_batch_size or max(machine["gpus"] for machine in machines)
    plans = []
    for machine in machines:
        try:
            question = ask(model, global_batch_size=batch, **(asked | machine))
        except ConfigError as error:
            raise ConfigError(f"--compare {machine['hardware']}x{machine['gpus']}: {error}") from None
        plans.append(search(question))
    return sorted(plans, key=_rank)


WAYS = ("full", "lora", "qlora")
"""full: all weights are trained. lora: adapters beside a frozen model. qlora: adapters beside a frozen model in 4 bits.
"""
DEFAULT_RANK = 16


def compare_ways(model: str, gpus: int, ways: str, **asked: Any) -> list[Plan]:
    """Return the best plan for each way of training in `ways` (names with commas between), in the order of `compare`.

    `asked` and errors as in `compare`, and ConfigError for an unknown way. Without `lora_rank` LoRA has DEFAULT_RANK.
    """
    plans, rank = [], asked.pop("lora_rank", 0) or DEFAULT_RANK
    for way in (name.strip() for name in ways.split(",")):
        if way not in WAYS:
            raise ConfigError(f"--train-as {ways} names {way or 'nothing'}: give some of {', '.join(WAYS)}")
        changes = {} if way == "full" else {"lora_rank": rank, "quantize": "nf4" if way == "qlora" else "none"}
        plans.append(search(ask(model, gpus, **{**asked, "quantize": "none", **changes})))
    return sorted(plans, key=_rank)


def _rank(plan: Plan) -> tuple[int, float]:
    question, best = plan.question, plan.best
    if best is None:
        return 2, 0.0
    dollars = question.dollars(billion_tokens_s(question, best.step))
    return (1, -_tokens_per_s(question, best)) if dollars is None else (0, dollars)


def _tokens_per_s(question: Question, best: Choice) -> float:
    return best.step.tgs * question.gpus


def comparison(plans: Sequence[Plan], columns: int | None = None) -> str:
    """Return the table of `compare`, with the reason for each machine on which nothing fits.

    `columns`: most characters of a line of the table; None for any number.
    """
    rows: list[tuple[str, ...]] = [_HEADS]
    lines = []
    is_priced = any(plan.best is not None and plan.question.price is not None for plan in plans)
    order = "so it comes after those with one" if is_priced else "so machines are ranked by tokens a second"
    for rank, plan in enumerate(plans, start=1):
        rows.append(_row(rank, plan))
        if plan.best is None:
            lines.append(f"{_machine(plan.question)}: nothing fits: {shortage_of(plan.question)}")
        elif plan.question.price is None:
            lines.append(f"{_machine(plan.question)}: no price is known, {order}: NAMExGPUS@DOLLARS gives one")
    lines += _errors(plans)
    for plan in plans:
        question = plan.question
        price = "" if question.price is None else f"{question.price.told}; "
        lines.append(f"{_machine(question)}: {price}{assumed_node(question.hardware)}")
        lines += [f"  {question.node_share_text}"] if question.node_share < 1.0 else []
    question = plans[0].question
    title = f"{question.model.name}, {question.seq_len:,} tokens x {question.global_batch_size} sequences a step"
    spare = [_HEADS.index(name) for name in _SPARE]
    table = text_table(rows, {1, 2, 4}, columns=columns, spare=spare, wrapped=(4, 2))
    return "\n".join([title, "", table, "", *lines]).rstrip()


def _errors(plans: Sequence[Plan]) -> list[str]:
    """Return the errors of predicted speeds, each with its machines, and kernels that a run may replace."""
    machines: dict[str, list[str]] = {}
    for plan in plans:
        if plan.best is not None:
            names = machines.setdefault(str(speed_error(plan.question, plan.best)), [])
            names += [name for name in (plan.question.hardware.name,) if name not in names]
    told = [
        f"{', '.join(sorted(names))}: {error} (sources: memo hardware NAME)"
        for error, names in sorted(machines.items())
    ]
    return [*told, *filter(None, [plans[0].question.foreseen_kernels])]


def as_object(plan: Plan) -> dict[str, Any]:
    """Return one line of the comparison for programs; values that need a plan or a price are None without it."""
    question, best, model = plan.question, plan.best, plan.question.model.sizes
    step = None if best is None else best.step
    return {
        "hardware": question.hardware.name,
        "gpus": question.gpus,
        "lora_rank": model.lora_rank,
        "quantize": model.quantize,
        "foreseen_kernels": question.foreseen_kernels,
        "node_share": question.node_share,
        "host_memory_gib": question.host_memory_gib,
        "layout": best and str(best.layout),
        "activations": best and str(best.strategy),
        "tokens_per_s": best and _tokens_per_s(question, best),
        "step_time_s": step and step.step_time_s,
        "mfu_percent": step and step.mfu_percent,
        "tgs_error_percent": best and 100 * speed_error(question, best).share,
        "dollars_per_hour": question.dollars(3600.0),
        "dollars_per_billion_tokens": step and question.dollars(billion_tokens_s(question, step)),
    }


def _row(rank: int, plan: Plan) -> tuple[str, ...]:
    question, best = plan.question, plan.best
    hour = dollars_text(question.dollars(3600.0))
    row = {"": str(rank), "machine": _machine(question), "layout": "nothing fits", "$/h": hour}
    if best is not None:
        row |= cells_of(question, best)
        row["tokens/s"] = f"{_tokens_per_s(question, best):,.0f}"
        row["a billion tokens"] = duration(billion_tokens_s(question, best.step))
    return tuple(row.get(head, "") for head in _HEADS)


def _machine(question: Question) -> str:
    model = question.model.sizes
    way = f", LoRA of rank {model.lora_rank}" if model.lora_rank else ""
    way += f" beside {model.quantize}" if model.quantize != "none" else ""
    return f"{question.gpus} x {question.hardware.name}{way}"
