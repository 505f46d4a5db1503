"""Duration and price of a run, as text for a person who plans it."""

from collections.abc import Mapping
from dataclasses import replace

from memo.config import RunConfig
from memo.estimate.hardware import Hardware
from memo.search.question import Question
from memo.simulate import StepPrediction, predict_step
from memo.units import GIB

_SLOWEST_PINNED_GIB_PER_S, _FASTEST_PINNED_GIB_PER_S = 1.0, 9.0
"""Published rates at which CUDA pins host memory. Slowest: 1 to 2 GB/s to register new memory (openvm's stark-backend
pull 384); it can be far slower if no huge pages are free (TensorRT-LLM issue 15430). Fastest: 511 GiB in 55 s (vLLM
issue 51080). A further report has 4.2 GiB/s (ik_llama.cpp pull 1517). The driver serves one process at a time, so the
ranks of a node take turns."""
_WORTH_TELLING_S = 60.0
_WORTH_TELLING = 0.01
"""Share of a step below which the time that fused kernels save is not told."""


def billion_tokens_s(question: Question, step: StepPrediction) -> float:
    """Return the seconds in which a billion tokens are trained."""
    return 1e9 / question.tokens * step.step_time_s


def durations(question: Question, step: StepPrediction) -> list[str]:
    """Return lines with the duration of a step and of a billion tokens, and their dollars if a price is known."""
    step_s, billion_s = step.step_time_s, billion_tokens_s(question, step)
    lines = [f"a step takes {duration(step_s)}, a billion tokens {duration(billion_s)}"]
    price = question.price
    if price is None:
        return lines
    of_step, of_billion = (dollars_text(question.dollars(seconds)) for seconds in (step_s, billion_s))
    return [
        *lines,
        f"at {price} a step costs ${of_step}, a billion tokens ${of_billion}",
        f"price: {price.told}; {assumed_node(question.hardware)}",
    ]


def fused_kernels(
    question: Question, config: RunConfig, step: StepPrediction, moved: Mapping[str, int] | None
) -> list[str]:
    """Return a line about what fused kernels would save, unless the run has them or they save next to nothing."""
    if question.hardware.device != "cuda" or config.hardware.kernels == "triton":
        return []
    fused = replace(config, hardware=replace(config.hardware, kernels="triton"))
    share = 1 - predict_step(fused, question.gpus, question.hardware, moved).step_time_s / step.step_time_s
    if share < _WORTH_TELLING:
        return []
    return [
        f"--kernels triton, which fuses norms, RoPE, activations and the loss, would take {share:.0%} less time; these "
        "kernels have not been timed on a GPU yet"
    ]


def assumed_node(machine: Hardware) -> str:
    """Return which host memory and link a plan assumes: machines of the same price differ in them."""
    rate = min(machine.offload_gb_per_s, machine.prefetch_gb_per_s)
    return f"the plan assumes {machine.host_memory_gib:,g} GiB of host memory and {rate:g} GB/s between it and each GPU"


def pinning(host_bytes: int) -> list[str]:
    """Return a line with the time in which a run pins host memory before its first step; no line if it is short."""
    least_s, most_s = (host_bytes / GIB / rate for rate in (_FASTEST_PINNED_GIB_PER_S, _SLOWEST_PINNED_GIB_PER_S))
    if most_s < _WORTH_TELLING_S:
        return []
    rates = f"{_SLOWEST_PINNED_GIB_PER_S:g} to {_FASTEST_PINNED_GIB_PER_S:g} GiB/s"
    return [
        f"before the first step: pinning {host_bytes / GIB:,.0f} GiB of a node's host memory takes {duration(least_s)} "
        f"to {duration(most_s)} (published rates: {rates}; memo has measured none)"
    ]


def duration(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.1f} seconds"


def dollars_text(amount: float | None) -> str:
    """Return dollars, with cents below 100; empty without a price."""
    return "" if amount is None else f"{amount:,.2f}" if amount < 100 else f"{amount:,.0f}"
