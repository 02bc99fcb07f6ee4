"""The length of documents at each step of a training. In Sparse Memory Training, section 4, it grows by 2K tokens every
1,000 steps.

    stages: first, first + by, first + 2 by, ..., target        a stage lasts `every` steps

A pure function of the step, and so of a sample's index: the same under any number of workers and after a resume. In the
paper `by` equals the number of targets, so the targets of the stages cover each position between the window and the
longest length once: no later stage trains it again. The mode `cover` therefore samples the length of each step from
the stages reached so far.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from farspan.train.config import Settings


class LengthSettings(Settings):
    """[lengths]: tokens of the documents that rows are sampled from."""

    target: int = Field(gt=1)  # tokens of the last stage, to which the model is extended
    first: int | None = Field(None, gt=1)  # tokens of the first stage; default one and a half windows
    by: int | None = Field(None, gt=0)  # tokens from one stage to the next; default half a window
    every: int | None = Field(None, gt=0)  # steps of a stage; default: all stages have the same number
    mode: Literal["progressive", "cover", "fixed"] = "progressive"  # cover: returns to reached stages; fixed: `target`

    @model_validator(mode="after")
    def _of_mode(self) -> "LengthSettings":
        if self.mode == "fixed":
            self.refuse_unused(("first", "by", "every"), "mode = 'fixed'", 'mode = "progressive" or "cover"')
        return self


@dataclass(frozen=True)
class Schedule:
    """The length of documents at each step, in tokens."""

    stages: tuple[int, ...]  # tokens
    every: int | None  # steps of a stage; None: the stages divide all steps equally
    steps: int
    cover: bool
    seed: int

    def stage(self, step: int) -> int:
        """Return the index of the last stage reached at `step`. Both count from 0."""
        reached = step // self.every if self.every else step * len(self.stages) // self.steps
        return min(reached, len(self.stages) - 1)

    def at(self, step: int) -> int:
        """Return the length of documents in tokens at `step`, which counts from 0."""
        stage = self.stage(step)
        if self.cover:
            stage = int(np.random.default_rng((self.seed, step, 1)).integers(stage + 1))
        return self.stages[stage]


def schedule(settings: LengthSettings, window: int, steps: int, seed: int) -> Schedule:
    """Return the schedule of a training of `steps` steps that extends a window of `window` tokens.

    Raises:
        ValueError: `target` is not above the window, `first` not between window and target, or `steps` too few to reach
            the last stage.
    """
    first = settings.first or window + window // 2
    by = settings.by or max(1, window // 2)
    if settings.target <= window:
        raise ValueError(
            f"lengths.target = {settings.target:,} is within the window of {window:,} tokens: give a longer one"
        )
    if settings.mode == "fixed":
        return Schedule((settings.target,), None, steps, False, seed)
    first = min(first, settings.target) if settings.first is None else first
    if not window < first <= settings.target:
        raise ValueError(
            f"lengths.first = {first:,} must be above the window of {window:,} tokens, and at most "
            f"lengths.target = {settings.target:,}"
        )
    before = range(first, settings.target, by)
    needed = len(before) * settings.every + 1 if settings.every else len(before) + 1
    if needed > steps:
        fewer = (steps - 1) // (settings.every or 1)  # lengths before the target that these steps allow
        fix = f"lengths.by >= {-(-(settings.target - first) // fewer):,}" if fewer else 'lengths.mode = "fixed"'
        also = " or a lower lengths.every" if settings.every else ""
        raise ValueError(
            f"lengths.target = {settings.target:,} is length {len(before) + 1:,} and needs trainer.steps >= "
            f"{needed:,}: got {steps:,}. Train longer, or give {fix}{also}"
        )
    return Schedule((*before, settings.target), settings.every, steps, settings.mode == "cover", seed)
