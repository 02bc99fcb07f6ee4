"""The length of documents at each step of a training: section 4 of Sparse Memory Training, "every 1,000 steps 2K more".

    stages: first, first + by, first + 2 by, ..., target        a stage lasts `every` steps

A pure function of the step, and so of a sample's index: the same under any number of workers and after a resume. With
`by` of as many tokens as there are targets, as in the paper, the targets of the stages tile all positions between the
window and the longest length once, and no later stage trains them again. `cover` therefore samples each step's length
from the stages reached so far.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from farspan.train.config import Settings


class LengthSettings(Settings):
    """[lengths]: tokens of the documents that rows are sampled from."""

    target: int = Field(gt=1)  # tokens that the model is extended to
    first: int | None = Field(None, gt=1)  # default one and a half windows
    by: int | None = Field(None, gt=0)  # default half a window
    every: int | None = Field(None, gt=0)  # steps of a stage; default all stages last as long
    mode: Literal["progressive", "cover", "fixed"] = "progressive"  # fixed: always the target


@dataclass(frozen=True)
class Schedule:
    """The length of documents at each step, in tokens."""

    stages: tuple[int, ...]  # tokens
    every: int | None  # steps; None: the stages share the steps
    steps: int
    cover: bool
    seed: int

    def stage(self, step: int) -> int:
        """Return the latest stage that is reached at a step, counted from 0."""
        reached = step // self.every if self.every else step * len(self.stages) // self.steps
        return min(reached, len(self.stages) - 1)

    def at(self, step: int) -> int:
        """Return the tokens of documents at a step, counted from 0."""
        stage = self.stage(step)
        if self.cover:
            stage = int(np.random.default_rng((self.seed, step, 1)).integers(stage + 1))
        return self.stages[stage]


def schedule(settings: LengthSettings, window: int, steps: int, seed: int) -> Schedule:
    """Return the schedule of a training that extends a window of `window` tokens.

    Raises:
        ValueError: a target within the window, a first length beyond the target, or stages that no step reaches.
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
        raise ValueError(
            f"trainer.steps = {steps:,} do not reach lengths.target = {settings.target:,}, stage {len(before) + 1}, "
            f"which begins with step {needed:,}: train longer, or with a lower lengths.every or a higher lengths.by"
        )
    return Schedule((*before, settings.target), settings.every, steps, settings.mode == "cover", seed)
