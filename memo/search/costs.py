"""How long a run takes, and what it costs, in words and dollars that a person plans with."""

from memo.search.question import Question
from memo.simulate import StepPrediction


def billion_tokens_s(question: Question, step: StepPrediction) -> float:
    """Seconds in which so many tokens are trained."""
    return 1e9 / question.tokens * step.step_time_s


def durations(question: Question, step: StepPrediction) -> list[str]:
    """Of a step and of a billion tokens, and their dollars if a price is known."""
    step_s, billion_s = step.step_time_s, billion_tokens_s(question, step)
    lines = [f"a step takes {duration(step_s)}, a billion tokens {duration(billion_s)}"]
    price = question.price
    if price is None:
        return lines
    of_step, of_billion = (dollars_text(question.dollars(seconds)) for seconds in (step_s, billion_s))
    return [
        *lines,
        f"at ${price.dollars_per_gpu_hour:g} a GPU and hour ({price.source}) a step costs ${of_step}, a billion tokens "
        f"${of_billion}",
    ]


def duration(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.1f} seconds"


def dollars_text(amount: float | None) -> str:
    """Cents where they count; empty without a price."""
    return "" if amount is None else f"{amount:,.2f}" if amount < 100 else f"{amount:,.0f}"
