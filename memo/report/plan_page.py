"""One page about a plan: the question, the ranked layouts with their errors, memory, and the step as it is foreseen."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memo.artifacts.regular_file import replace_file
from memo.errors import ArtifactError, writing
from memo.estimate.rank_memory import components
from memo.report import html
from memo.report.drawing import colour_of, encoded, panels
from memo.report.memory_drawing import draw_plans
from memo.search.candidates import config_of
from memo.search.plan import Choice, Plan, speed_error
from memo.search.planning import Tell, plans_by_length, silent
from memo.search.question import Question
from memo.search.tables import Commands, about_best, cells, errors, title
from memo.simulate.rows import ROWS
from memo.simulate.trace import Span, simulate_step
from memo.units import GIB

MOST_BLOCKS = 4000
"""Of one row of the timeline: more would not be told from each other."""

_ROUNDS = 2
"""Microbatches of the timeline for each stage."""
_LEAD = "Foreseen: speed is simulated and memory counted; no GPU was asked."
_COLOURS = {"compute": 0, "offload": 1, "prefetch": 2, "data": 3, "cpu": 4, "disk": 5}
_STEP_CAPTION = (
    "The first stage in a step of {microbatches} microbatches. compute: layers, loss and update; offload, prefetch: "
    "copies of activations and states to host memory and back; data: gradients and weights between ranks; cpu: "
    "updates in host memory; disk: activations that host memory does not hold. White between blocks of compute is "
    "time that it waits."
)


def write_plan_page(plan: Plan, commands: Commands, path: str | Path, tell: Tell = silent) -> None:
    """Write the page of a plan to a file of HTML that needs no other; `tell` hears what is being done.

    Raises ConfigError if matplotlib is missing, ArtifactError if the file cannot be written.
    """
    text = plan_page(plan, commands, tell)
    with writing(f"--html {path}", ArtifactError):
        replace_file(path, text)


def plan_page(plan: Plan, commands: Commands, tell: Tell = silent) -> str:
    """The page, as text. The plan must have a best choice."""
    parts = [
        html.section("The answer", html.bullets(about_best(plan, commands))),
        html.section("Layouts that fit", *_layouts(plan)),
        html.section("Memory of the best", _memory(plan)),
        html.section("Memory by length of the sequence", _lengths(plan.question, tell)),
        html.section("The step of the best", _step(plan)),
    ]
    if plan.refusals:
        parts.append(html.section("Refused", _refused(plan)))
    return html.page(title(plan.question), _LEAD, parts)


def _layouts(plan: Plan) -> list[str]:
    shown = plan.shown
    head, *rows = cells(shown, plan.question, plan.ties())
    caption = "Tokens of one GPU in a second, as foreseen, with the error that its parts have."
    drawn = html.picture(encoded(_draw_speeds(shown, plan.question)), "speeds and their errors", caption)
    return [html.table(head, rows), *map(html.note, errors(plan, shown)), drawn]


def _draw_speeds(choices: Sequence[Choice], question: Question) -> Any:
    figure, (axes,) = panels("--html", 8.5, 0.9 + 0.32 * len(choices))
    speeds = [choice.step.tgs for choice in choices]
    reach = [speed * speed_error(question, choice).share for speed, choice in zip(speeds, choices, strict=True)]
    axes.errorbar(speeds, range(len(choices)), xerr=reach, fmt="o", color="0.15", ecolor="0.6", capsize=3, markersize=4)
    axes.set_yticks(range(len(choices)), [f"{choice.layout}\n{choice.strategy}" for choice in choices])
    axes.set_ylim(len(choices) - 0.5, -0.5)  # the first on top
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens per GPU and second")
    axes.tick_params(labelsize=7)
    return figure


def _memory(plan: Plan) -> str:
    best, question = plan.shown[0], plan.question
    parts = {name: size for name, size in components(best.sized.memory).items() if size and name != "host"}
    rows = [[f"one GPU: {name.replace('_', ' ')}", f"{size / GIB:,.2f}", ""] for name, size in parts.items()]
    rows += [
        ["one GPU, in all", f"{best.sized.memory.total / GIB:,.2f}", f"{question.gpu_memory_gib:.4g}"],
        ["host memory of a node", f"{best.sized.host_bytes / GIB:,.2f}", f"{question.host_memory_gib:,g}"],
    ]
    if question.hardware.nvme_gib:
        rows.append(
            ["disks of a node", f"{best.sized.disk_bytes / GIB:,.2f}", f"{question.hardware.nvme_gib:,g}"],
        )
    return html.table(["GiB", "takes", "there is"], rows)


def _lengths(question: Question, tell: Tell) -> str:
    plans = plans_by_length(question, tell)
    caption = "One GPU's memory by component under the fastest plan of each length, and below it host memory of a node."
    return html.picture(encoded(draw_plans(plans, "--html")), "memory by length", caption)


def _step(plan: Plan) -> str:
    best = plan.shown[0]
    caption = _STEP_CAPTION.format(microbatches=best.layout.pp * _ROUNDS)
    return html.picture(encoded(_draw_step(first_stage(plan.question, best))), "timeline of a step", caption)


def first_stage(question: Question, choice: Choice) -> list[Span]:
    """What ranks of the first pipeline stage do in a step of few microbatches: a pipeline fills, runs and empties."""
    layout = choice.layout
    sequences = question.gpus // layout.ranks * layout.mbs * layout.pp * _ROUNDS
    config = config_of(replace(question, global_batch_size=sequences), layout, choice.strategy)
    step = simulate_step(config, question.gpus, question.hardware, choice.moved)
    return [span for span in step.spans if span.stage == 0]


def _draw_step(spans: Sequence[Span]) -> Any:
    rows = [row for row in ROWS if any(span.row == row for span in spans)]
    figure, (axes,) = panels("--html", 9.5, 0.8 + 0.4 * len(rows))
    for at, row in enumerate(rows):
        blocks = [(span.start_s, span.end_s - span.start_s) for span in spans if span.row == row][:MOST_BLOCKS]
        colour = colour_of(_COLOURS[row])
        axes.broken_barh(blocks, (at - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(span.end_s for span in spans))
    axes.set_xlabel("seconds")
    axes.spines["left"].set_visible(False)
    return figure


def _refused(plan: Plan) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in plan.counts().items())
    rows = [[str(refused.layout), str(refused.reason), refused.text] for refused in plan.refusals]
    return html.folded(counts, html.table(["layout", "reason", "in full"], rows, numbers=False))
