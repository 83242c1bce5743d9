"""What ends a run, and what its best head is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .config import ScheduleConfig, TrainConfig
from .data import Documents

FIGURES = {
    "tau": ("tau",),
    "tau_t1": ("tau_t1",),
    "mean": ("tau", "tau_t1"),
    "decoded": ("tau_decoded",),
}
"""Of what held-out figures `schedule.select` takes the mean."""


def judged_by(config: TrainConfig, documents: Documents) -> str:
    """What the figures of evaluations come from: held-out rows and, decoded, how much of them."""
    tracking = config.tracking
    decoded = f" {tracking.samples} x {tracking.sample_tokens}"
    return documents.judged_by + (decoded if config.schedule.select == "decoded" else "")


class Limits:
    """Steps, minutes and patience of a run, counted over all its resumptions.

    Attributes:
        seconds: wall time of the training steps so far.
        scores: of the evaluations so far.
    """

    def __init__(
        self, schedule: ScheduleConfig, state: Mapping[str, Any], judged_by: str | None = None
    ) -> None:
        """Args:
        state: of a checkpoint, see `state`; empty for a new run.
        judged_by: see the function; None: not known here.
        """
        self.schedule, self.judged_by = schedule, judged_by
        self.seconds: float = state.get("seconds", 0.0)
        same = measured_alike(schedule, state, judged_by)
        self.scores: list[float] = list(state.get("scores", [])) if same else []

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        scored = {"scores": list(self.scores), "select": self.schedule.select}
        return {"seconds": self.seconds, **scored, "judged_by": self.judged_by}

    @property
    def spent(self) -> float:
        """Share of `minutes` that is used; 0 without such a bound."""
        minutes = self.schedule.minutes
        return 0.0 if minutes is None else self.seconds / (60 * minutes)

    def reached(self, step: int) -> str | None:
        """The limit that a run has met after `step` steps, in words; None: it goes on."""
        schedule = self.schedule
        if step >= schedule.steps:
            return f"schedule.steps is {schedule.steps}"
        if self.spent >= 1:
            return f"schedule.minutes is {schedule.minutes:g}"
        if schedule.patience is not None and self._without_gain() >= schedule.patience:
            return f"schedule.patience is {schedule.patience}"
        return None

    def _without_gain(self) -> int:
        """Evaluations after the first of the best ones."""
        return len(self.scores) - 1 - self.scores.index(max(self.scores)) if self.scores else 0


def measured_alike(
    schedule: ScheduleConfig, state: Mapping[str, Any], judged_by: str | None = None
) -> bool:
    """Are the scores of a checkpoint of the figure that `schedule.select` asks for, on these rows?
    What is not known on either side is taken to be the same."""
    same = bool(state.get("select", schedule.select) == schedule.select)
    return same and same_rows(state, judged_by)


def same_rows(state: Mapping[str, Any], judged_by: str | None) -> bool:
    """Was a checkpoint, or the head of a head.json, judged by these rows, as far as is known?"""
    rows = state.get("judged_by")
    return None in (rows, judged_by) or rows == judged_by


def score(figures: Mapping[str, Any], schedule: ScheduleConfig) -> float | None:
    """What `schedule.select` asks for, of an evaluation or of head.json; None where that has not
    got it.  NaN counts as -inf, which is never better."""
    names = FIGURES[schedule.select]
    values = [figures[name] for name in names if figures.get(name) is not None]
    if len(values) < len(names):
        return None
    mean = sum(values) / len(values)
    return -math.inf if math.isnan(mean) else mean
