"""The answer of a search: the choices that fit, ranked, and the refused layouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from memo.estimate.time_errors import TIE_SHARE, TimeError, time_error
from memo.search.candidates import Layout, Strategy
from memo.search.costs import billion_tokens_s, dollars_text
from memo.search.question import Question
from memo.search.sizing import Sized
from memo.simulate import StepPrediction
from memo.text_table import html_table
from memo.units import GIB

TRIAL_GAIN = TIE_SHARE
"""Least gain in speed over the best choice that is worth a start that may fail. A smaller gain would be a tie."""
_NOTEBOOK = ("layout", "dp", "activations", "tok/GPU/s", "MFU %", "step s", "GPU GiB", "host GiB", "verdict")
"""Columns of a table in a notebook."""


class Longest(NamedTuple):
    """The longest sequence that fits.

    Attributes:
        seq_len: tokens; 0 if not even one unit fits.
        unit: tokens; lengths are multiples of it.
        limit: why the next length does not fit: the layout that comes nearest and the memory that it lacks, or the
            limit of the model.
    """

    seq_len: int
    unit: int
    limit: str


class Largest(NamedTuple):
    """The largest model that fits.

    Attributes:
        parameters: number of parameters; 0 if not even the smallest model fits.
        limit: why the next model does not fit, or trains too slowly.
        unclipped_parameters: parameters of the largest model with --clip-grad 0, whose gradients need no room in host
            memory; equal to `parameters` if speed is the limit.
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


class Refusal(NamedTuple):
    """A layout that fits under no strategy. `tell` computes `text`, which takes long, so only for shown refusals."""

    layout: Layout
    reason: Reason
    tell: Callable[[], str] = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """The reason in words, for the strategy that needs least memory."""
        return self.tell()


@dataclass(frozen=True)
class Timed:
    """A candidate with its simulated step.

    Attributes:
        limit: the limit that prevents a faster strategy.
        moved: tiles that move, by group, under alpha auto; None otherwise.
    """

    layout: Layout
    strategy: Strategy
    step: StepPrediction
    limit: str
    moved: Mapping[str, int] | None


def step_s(choice: Timed) -> float:
    return choice.step.step_time_s


@dataclass(frozen=True)
class Choice(Timed):
    """A candidate with its memory: all bytes are counted only for candidates that are shown."""

    sized: Sized


@dataclass(frozen=True)
class Plan:
    """The answer of a search.

    Attributes:
        choices: candidates that fit: the fastest of each tp x cp x pp, or all if all were asked for. The best comes
            first (`ranking._best_first`), then the rest by speed.
        unsure: candidates that would be faster but whose verdict is unsure; never among the choices.
        refusals: layouts that memo cannot run, and layouts that were judged and do not fit. Layouts that are slower
            than the shown choices were not judged.
        num_candidates: number of pairs of layout and strategy whose memory was judged.
        num_fitting: number of these pairs that fit.
        longest: set if the longest sequence was asked for; `question` then has that length.
        largest: set if the largest model was asked for; `question` is then about that model.
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
        """Return the ranked choices as a notebook shows them, after the trial if there is one."""
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
        """The choice to try before the fitting ones: the fastest unsure one, if it is more than TRIAL_GAIN faster.

        Only its GPU memory may be unsure: the first step shows whether it fits, and a failure costs only the start. If
        host memory ran out, other processes of the node would die too.
        """
        if self.best is None or not self.unsure:
            return None
        first = self.unsure[0]
        worth_it = self.fastest_s > (1.0 + TRIAL_GAIN) * step_s(first)
        return first if worth_it and first.sized.host_excess <= 1.0 else None

    @property
    def shown(self) -> tuple[Choice, ...]:
        """The trial if there is one, then all choices that surely fit."""
        return self.choices if self.trial is None else (self.trial, *self.choices)

    @property
    def fastest_s(self) -> float:
        """Seconds of the fastest step among the choices."""
        return min(map(step_s, self.choices))

    def ties(self) -> tuple[Choice, ...]:
        """Return the choices as good as the fastest, which is included: the prediction cannot tell which is faster."""
        return as_good(self.choices, TIE_SHARE)

    def counts(self) -> dict[Reason, int]:
        """Return the number of refused layouts by reason."""
        reasons = [refused.reason for refused in self.refusals]
        return {reason: reasons.count(reason) for reason in Reason if reason in reasons}


def speed_error(question: Question, choice: Timed) -> TimeError:
    """Return how far the predicted speed of a choice may lie from a measured speed."""
    return time_error(question.hardware, choice.step.parts)


def cells_of(question: Question, choice: Choice) -> dict[str, str]:
    """Return a choice's row of a table: cells by column head, in the order of the columns."""
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
    """Return the choices whose step is at most the share `share` longer than the fastest step."""
    most_s = (1.0 + share) * min(map(step_s, choices), default=0.0)
    return tuple(choice for choice in choices if step_s(choice) <= most_s)
