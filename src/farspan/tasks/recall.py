"""Recall by distance: how well a model copies from near and far positions, in texts of one length.

This is the probe protocol of the forgetting curve (`farspan.tasks.curve`) at evenly spaced depths of one length. Its
rows record the task `curve`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from farspan.lm import LM
from farspan.specs import limited
from farspan.tasks.base import Quality
from farspan.tasks.copy_task import MEAN_RECALLED, CopyTask
from farspan.tasks.curve import BoundCurve


@dataclass(frozen=True)
class Recall(CopyTask):
    """Copy accuracy and control by depth in texts of one length."""

    points: int = limited(16, 2, 1000)  # depths, evenly spaced from the beginning of the text to its end
    warmup: int | None = limited(None, 0, quiet=True)  # tokens of a probe before `scored`, as in curve
    scored: int | None = limited(None, 1, quiet=True)  # tokens of a probe that are scored, as in curve
    target_text: str | None = None  # the text to copy, as in curve
    prefix_text: str | None = None  # the irrelevant text of the control, as in curve

    name: ClassVar[str] = "recall"
    quality: ClassVar[Quality] = Quality("copy - control", MEAN_RECALLED, higher_is_better=True, graded=True)

    def resolved(self, lengths: Sequence[int] | None, trained: Sequence[int]) -> Self:
        largest, context = (lengths[-1], lengths[0]) if lengths else (max(trained) // 2, max(trained))
        usual = sum(self.probe_tokens(largest, None))
        # a probe of more than half of the text is at nearly the same distance at all depths
        warmup, scored = self.probe_tokens(largest, context, always=not lengths or 2 * usual > context)
        return replace(self, warmup=warmup, scored=scored)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return the longest length whose whole context is within the trained length of all models, for separators of
        one token."""
        task = self.resolved(None, trained)
        return (max(2, min(trained) - 2 - (task.warmup or 0) - (task.scored or 0)),)

    @property
    def row_task(self) -> str:
        return BoundCurve.task

    def on(self, lm: LM, text: str) -> "BoundRecall":
        self.refuse_open(warmup=self.warmup, scored=self.scored)
        target, prefix = self.named_texts(lm, text)
        return BoundRecall(
            protocol="probe",
            warmup=self.warmup,
            scored=self.scored,
            depths=tuple(np.linspace(0, 1, self.points).round(6).tolist()),
            target=target,
            prefix=prefix,
        )


class BoundRecall(BoundCurve):
    """Recall by distance in one text."""

    adaptive: ClassVar[bool] = False

    def auto_lengths(self, lm: LM, repeats: int, *, quiet: bool = False) -> tuple[int, ...]:
        """Return the longest length whose whole context is within the model's trained length."""
        return (self.longest(lm, 1),)
