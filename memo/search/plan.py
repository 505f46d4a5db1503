"""The answer of a search: the choices that fit, ranked, and what was refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from memo.estimate.time_errors import TIE_SHARE, TimeError, time_error
from memo.search.candidates import Layout, Strategy
from memo.search.costs import billion_tokens_s, dollars_text
from memo.search.question import Question
from memo.search.sizing import Sized
from memo.simulate import StepPrediction
from memo.text_table import html_table
from memo.units import GIB

TRIAL_GAIN = TIE_SHARE
"""Of the best one's speed: what a start that may fail is worth. Less would be a tie."""
_NOTEBOOK = ("layout", "dp", "activations", "tok/GPU/s", "MFU %", "step s", "GPU GiB", "host GiB", "verdict")
"""Columns of a table in a notebook."""


@dataclass(frozen=True)
class Longest:
    """The answer.

    Attributes:
        seq_len: tokens; 0 where not even one unit fits.
        unit: lengths are multiples of it.
        limit: why the next length does not fit: the layout that comes nearest, and the memory it lacks; or what
            the model forbids.
    """

    seq_len: int
    unit: int
    limit: str


@dataclass(frozen=True)
class Largest:
    """The answer.

    Attributes:
        parameters: 0 where not even the smallest fits.
        limit: why the next one does not fit, or trains too slowly.
        unclipped_parameters: of the largest model with --clip-grad 0, whose gradients need no room in host memory; the
            same where speed is what binds.
    """

    family: str
    num_layers: int
    hidden_size: int
    parameters: int
    limit: str
    unclipped_parameters: int


class Reason(StrEnum):
    """Why a layout is refused."""

    LAYOUT = "cannot be laid out"
    GPU = "out of GPU memory"
    HOST = "out of host memory"
    UNSURE = "unsure whether it fits"


@dataclass(frozen=True)
class Refusal:
    """A layout that no strategy makes fit; `tell` gives `text`, which takes long, so only what is shown is asked."""

    layout: Layout
    reason: Reason
    tell: Callable[[], str] = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """Why, of the strategy that needs least."""
        return self.tell()


@dataclass(frozen=True)
class Timed:
    """A candidate with its simulated step.

    Attributes:
        limit: what kept it from a faster strategy.
        moved: tiles by group under alpha auto.
    """

    layout: Layout
    strategy: Strategy
    step: StepPrediction
    limit: str
    moved: Mapping[str, int] | None


def step_s(choice: Timed | None) -> float:
    return inf if choice is None else choice.step.step_time_s


@dataclass(frozen=True)
class Choice(Timed):
    """With its memory: only of candidates that are shown all bytes are counted."""

    sized: Sized


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        choices: that fit; of each tp x cp x pp the fastest, or all where all were asked for. The first is the best, as
            of `_best_first`, and the others follow by speed.
        unsure: those that would be faster but whose verdict is unsure; never among the choices.
        refusals: layouts that memo cannot run, and those that were looked at and do not fit: all that are not slower
            than what is shown.
        num_candidates: layouts x strategies whose memory was looked at.
        num_fitting: those of them that fit.
        longest: where the longest sequence was asked for; the question is then at that length.
        largest: where the largest model was asked for; the question is then about it.
    """

    question: Question
    choices: tuple[Choice, ...]
    unsure: tuple[Choice, ...]
    refusals: tuple[Refusal, ...]
    num_candidates: int
    num_fitting: int
    longest: Longest | None = None
    largest: Largest | None = None

    def __repr__(self) -> str:
        """One line, as a plan holds hundreds of refusals."""
        best = self.best
        found = "nothing fits"
        if best is not None:
            found = f"best {best.layout}: {best.strategy}, {best.step.tgs:,.0f} tokens/GPU/s"
        return f"<Plan: {self._asked()}: {found}; {len(self.choices)} choices, {len(self.refusals)} layouts refused>"

    def _repr_html_(self) -> str:
        """The ranked choices as a notebook shows them; what to try before them, if anything, comes first."""
        rows = [cells_of(self.question, choice) for choice in self.shown]
        return html_table([_NOTEBOOK, *([row[head] for head in _NOTEBOOK] for row in rows)], self._asked())

    def _asked(self) -> str:
        asked = self.question
        batch = f"{asked.seq_len:,} tokens x {asked.global_batch_size} sequences"
        return f"{asked.model.name} on {asked.gpus} x {asked.hardware.name}, {batch}"

    @property
    def best(self) -> Choice | None:
        return self.choices[0] if self.choices else None

    @property
    def trial(self) -> Choice | None:
        """What to try before those that fit: the fastest that is unsure, where it is more than TRIAL_GAIN faster.

        Only of GPU memory may it be unsure: the first step then tells, and nothing but the start is lost. Host memory
        that runs out takes the node's other processes with it.
        """
        if self.best is None or not self.unsure:
            return None
        first = self.unsure[0]
        worth_it = self.fastest_s > (1.0 + TRIAL_GAIN) * step_s(first)
        return first if worth_it and first.sized.host_excess <= 1.0 else None

    @property
    def shown(self) -> tuple[Choice, ...]:
        """What to try first, where there is such a choice, then all that surely fits."""
        return self.choices if self.trial is None else (self.trial, *self.choices)

    @property
    def fastest_s(self) -> float:
        """Seconds of the fastest step among the choices."""
        return min(map(step_s, self.choices))

    def ties(self) -> tuple[Choice, ...]:
        """The choices that are as good as the fastest, which is among them: nobody can foresee which is faster."""
        return as_good(self.choices, TIE_SHARE)

    def counts(self) -> dict[Reason, int]:
        """Refused layouts by reason."""
        reasons = [refused.reason for refused in self.refusals]
        return {reason: reasons.count(reason) for reason in Reason if reason in reasons}


def speed_error(question: Question, choice: Timed) -> TimeError:
    """How far the speed foreseen for a choice may lie from a measured one."""
    return time_error(question.hardware, choice.step.parts)


def cells_of(question: Question, choice: Choice) -> dict[str, str]:
    """A choice's row of a table, by the heads of its columns in their order."""
    step, sized = choice.step, choice.sized
    dollars = question.dollars(billion_tokens_s(question, step))
    return {
        "layout": str(choice.layout),
        "dp": str(question.gpus // choice.layout.ranks),
        "activations": str(choice.strategy),
        "tok/GPU/s": f"{step.tgs:,.0f}",
        "±%": f"{100 * speed_error(question, choice).share:.0f}",
        "MFU %": f"{step.mfu_percent:.1f}",
        "TFLOP/s": f"{step.tflops_per_gpu:.1f}",
        "step s": f"{step.step_time_s:,.2f}",
        "GPU GiB": f"{sized.memory.total / GIB:.1f}",
        "host GiB": f"{sized.host_bytes / GIB:,.0f}",
        **({} if dollars is None else {"$/B tokens": dollars_text(dollars)}),
        **({"NVMe GiB": f"{sized.disk_bytes / GIB:,.0f}"} if question.hardware.nvme_gib else {}),
        "verdict": sized.told,
    }


def as_good(choices: Sequence[Choice], share: float) -> tuple[Choice, ...]:
    """Those whose step takes no more than such a share longer than the fastest one's."""
    most_s = (1.0 + share) * min(map(step_s, choices), default=0.0)
    return tuple(choice for choice in choices if step_s(choice) <= most_s)
