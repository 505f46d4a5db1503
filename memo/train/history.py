"""The result of `Trainer.train`: the records of its steps, which plot themselves in a notebook."""

import dataclasses
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from memo.artifacts.run_log import RunLog, StepRecord
from memo.errors import ConfigError
from memo.report.page import embedded
from memo.report.run_drawing import draw_loss

_MOST = 1 << 14
"""The most records that a history holds, about 16 MB."""


class History:
    """The steps of one `train()`, oldest first.

    It has the attributes of the last step's record, such as `history.lm_loss`, and is false if no step was left to
    take. Beyond 16,384 steps it keeps every second step, then every fourth and so on, and always the last step; the
    file of --log-jsonl has all steps.

    `trained_s` are the seconds that its `num_steps` steps took.
    """

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.evaluations: list[tuple[int, float]] = []
        """(iteration, nats per token) of each evaluation between steps."""
        self.num_steps, self.trained_s = 0, 0.0
        self._every = 1
        self._is_last_extra = False

    def add(self, record: StepRecord) -> None:
        if self._is_last_extra:
            self.records.pop()
        self._is_last_extra = self.num_steps % self._every != 0
        if len(self.records) >= _MOST and not self._is_last_extra:
            self.records, self._every = self.records[::2], 2 * self._every
        self.records.append(record)
        self.num_steps += 1
        self.trained_s += record.step_time_s

    @property
    def last(self) -> StepRecord | None:
        """The record of the last step; None if no step was left to take."""
        return self.records[-1] if self.records else None

    def to_dicts(self) -> list[dict[str, Any]]:
        """The records as dictionaries, for pandas.DataFrame and the like."""
        return [dataclasses.asdict(record) for record in self.records]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in StepRecord.__dataclass_fields__:
            raise AttributeError(f"a History has no attribute {name!r}: it has records and those of a StepRecord")
        if not self.records:
            raise AttributeError(f"{name} is of the last step, but train() took none: check `if history` first")
        return getattr(self.records[-1], name)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __getitem__(self, index: int) -> StepRecord:
        return self.records[index]

    def __repr__(self) -> str:
        if not self.records:
            return "History of no steps"
        first, last = self.records[0], self.records[-1]
        steps = f"step {first.iteration}" if first is last else f"steps {first.iteration} to {last.iteration}"
        text = (
            f"History of {steps}: loss {first.lm_loss:.4f} to {last.lm_loss:.4f} nats a token, {last.tgs:.0f} tokens "
        )
        text += "per GPU and second"
        if self.evaluations:
            text += f", held out {self.evaluations[-1][1]:.4f}"
        return text

    def _repr_html_(self) -> str:
        """For notebooks: the text of `repr`, and below it the loss curves of `memo report`."""
        text = f"<p>{escape(repr(self))}</p>"
        if not self.records:
            return text
        log = RunLog(Path(), None, tuple(self.records), evaluations=tuple(self.evaluations))
        try:
            curves = draw_loss({"training": log})
        except ConfigError as error:  # without matplotlib
            return f"{text}<p>{escape(str(error))}</p>"
        return f'{text}<img src="{embedded(curves.png or b"")}" alt="{curves.title}">'
