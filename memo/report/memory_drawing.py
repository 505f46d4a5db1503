"""A drawing of plans by sequence length: memory by component, and the strategy for each length."""

import textwrap
from collections.abc import Sequence
from typing import Any

from memo.report.drawing import colour_of, panels
from memo.search.plan import Choice, Plan
from memo.units import GIB, KIB

_PARTS = {
    "weights and gradients": ("weights", "gradients"),
    "optimizer": ("optimizer",),
    "activations kept": ("skeletal",),
    "rounding buffers": ("rounding_buffers",),
    "transient": ("transient",),
    "communication, context": ("communication", "context"),
}
"""Bars from the bottom; components that do not grow with the length come first."""
_LABEL_POINTS = 7
_LABEL_CHARACTERS = 15
"""Characters in a line of a label above a bar: at 7 points they are as wide as a bar and its gap, 0.95 inches."""
_LINE_SHARE = 0.045
"""Share of the height of the upper axes that a line of a label takes."""


def draw_plans(plans: Sequence[Plan], what: str, title: str = "") -> Any:
    """A figure: stacked bars of one GPU's memory at each length, the strategy above them, host memory of a node below.

    Every plan must have a best choice. Raises ConfigError, which names `what`, if matplotlib is missing.
    """
    figure, (above, below) = panels(what, 2.2 + 0.95 * max(4, len(plans)), 5.2, heights=(4, 1))
    chosen = [plan.best for plan in plans if plan.best is not None]
    question = plans[0].question
    labels = [_label(choice) for choice in chosen]
    most_lines = max(label.count("\n") + 1 for label in labels)
    _draw_gpu(above, chosen)
    for index, label in enumerate(labels):
        above.text(index, 1.02 * question.gpu_memory_gib, label, ha="center", va="bottom", fontsize=_LABEL_POINTS)
    above.axhline(question.gpu_memory_gib, color="black", linewidth=0.8, linestyle="--")
    above.set_ylim(0, 1.04 * question.gpu_memory_gib / (1.0 - _LINE_SHARE * most_lines))
    above.set_ylabel(f"GiB of one GPU (dashed: {question.gpu_memory_gib:.4g})")
    above.set_title(title, fontsize=9, loc="left")
    figure.legend(*above.get_legend_handles_labels(), fontsize=7, frameon=False, ncols=3, loc="outside lower center")
    below.bar(range(len(chosen)), [choice.sized.host_bytes / GIB for choice in chosen], 0.7, color="0.6")
    below.axhline(question.host_memory_gib, color="black", linewidth=0.8, linestyle="--")
    below.set_ylabel("GiB of a\nnode's host")
    ticks = [
        f"{plan.question.seq_len / KIB:,.0f}K\ntp{at.tp} cp{at.cp}\npp{at.pp} mbs{at.mbs}"
        for plan, at in zip(plans, (choice.layout for choice in chosen), strict=True)
    ]
    below.set_xticks(range(len(chosen)), ticks)
    below.set_xlabel("tokens of a sequence, and the layout")
    return figure


def _label(choice: Choice) -> str:
    """The label above a bar, no wider than the bar and its gap."""
    return "\n".join([*textwrap.wrap(str(choice.strategy), _LABEL_CHARACTERS), f"MFU {choice.step.mfu_percent:.0f} %"])


def _draw_gpu(axes: Any, chosen: Sequence[Choice]) -> None:
    at, bottoms = range(len(chosen)), [0.0] * len(chosen)
    for index, (label, names) in enumerate(_PARTS.items()):
        heights = [sum(getattr(choice.sized.memory, name) for name in names) / GIB for choice in chosen]
        axes.bar(at, heights, 0.7, bottom=bottoms, label=label, color=colour_of(index))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
