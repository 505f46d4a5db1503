"""One page about a plan: the job, the ranked layouts with their errors, memory, and the simulated step.

Its words are in templates/plan.html.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memo.artifacts.regular_file import replace_file
from memo.errors import ArtifactError, writing
from memo.estimate.rank_memory import components
from memo.report.drawing import colour_of, encoded, panels
from memo.report.memory_drawing import draw_plans
from memo.report.page import rendered
from memo.search.candidates import config_of
from memo.search.plan import Choice, Plan, speed_error
from memo.search.planning import Tell, plans_by_length
from memo.search.question import Question
from memo.search.tables import Commands, about_best, cells, errors, title
from memo.simulate.resources import ROWS
from memo.simulate.trace import Span, simulate_step

MOST_BLOCKS = 4000
"""The most blocks in one row of the timeline; more could not be distinguished."""

_ROUNDS = 2
"""Microbatches of the timeline for each stage."""
_COLOURS = {"compute": 0, "offload": 1, "prefetch": 2, "data": 3, "cpu": 4, "disk": 5}


def write_plan_page(plan: Plan, commands: Commands, path: str | Path, tell: Tell = lambda what: None) -> None:
    """Write the page of a plan to one self-contained HTML file; `tell` is called with the work that begins.

    Raises ConfigError if matplotlib is missing, ArtifactError if the file cannot be written.
    """
    text = plan_page(plan, commands, tell)
    with writing(f"--html {path}", ArtifactError):
        replace_file(path, text)


def plan_page(plan: Plan, commands: Commands, tell: Tell = lambda what: None) -> str:
    """The page, as text. The plan must have a best choice."""
    question, shown, best = plan.question, plan.shown, plan.shown[0]
    return rendered(
        "plan.html",
        title=title(question),
        plan=plan,
        question=question,
        best=best,
        answer=about_best(plan, commands),
        layouts=cells(shown, question, plan.ties()),
        errors=errors(plan, shown),
        speeds=encoded(_draw_speeds(shown, question)),
        parts=components(best.sized.memory),
        lengths=encoded(draw_plans(plans_by_length(question, tell), "--html")),
        step=encoded(_draw_step(first_stage(question, best))),
        microbatches=best.layout.pp * _ROUNDS,
    )


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


def first_stage(question: Question, choice: Choice) -> list[Span]:
    """The work of the first pipeline stage in a step of few microbatches, in which the pipeline fills, runs and
    empties."""
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
