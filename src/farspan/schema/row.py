"""A row: what one example gave at one length."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict

from farspan.lengths import LARGEST

MOST_BYTES = 2**63
Count = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
Cost = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]
Words = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One example at one length, raw and self-describing; a line of rows.jsonl."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str  # its name in the run
    method: str  # as `farspan.method` parses it
    task: str  # the name of the measurement
    version: Count  # of the task; incremented by changes that affect numbers
    settings: Words  # of the task, such as protocol and texts
    length: Count  # in the task's unit
    repeat: Count  # of the texts or examples, from 0
    seed: Annotated[int, Strict()]  # random seed of the texts
    example: str  # hash of the example's tokens and settings
    depth: Share = 0.0  # position in the text: 0 its beginning, 1 its end
    # or "oom", "nan", "too_long", "budget", "refused", "no_keys", "no_reference": then `scores` is empty or partial
    status: str = "ok"
    reason: str = ""  # of a status other than ok
    scores: Words = field(default_factory=dict)  # scores of the task, by name
    num_seen: Count = 0  # tokens the memory had read
    num_kept: Count = 0  # tokens it still held
    seconds: Cost = 0.0  # of this row
    peak_bytes: Annotated[int, Strict(), Field(ge=0, le=MOST_BYTES)] = 0  # of the device so far; of the process on CPUs
    # how it was read: `repeats` read together, `chunk` tokens of one forward, `cuts` of the text up to this length.
    # Rows read in the same way are equal in any precision; others in float32, on average in lower ones
    reading: Words = field(default_factory=dict)

    @cached_property
    def measurement(self) -> str:
        """The task with its settings, as one text."""
        return measurement_of(self.task, self.settings)

    @property
    def place(self) -> tuple[str, int, float]:
        """The example, length and depth that it measures, of a task, a model and a method."""
        return self.example, self.length, self.depth

    @property
    def key(self) -> tuple[str, str, str, str, int, float]:
        """Its identity in a run."""
        return self.model, self.method, self.measurement, *self.place

    @property
    def slot(self) -> tuple[Any, ...]:
        """What the last of several rows counts for: with more repeats, one may have got another example."""
        what = self.model, self.method, self.measurement, self.version, self.of_all
        return *what, self.seed, self.repeat, self.length, self.depth

    @property
    def of_all(self) -> bool:
        """Whether it stands for all examples at its length, none of which could be read."""
        return self.example == no_example(self.task)


def no_example(task: str) -> str:
    """Return what the one row of all examples of a task has in place of the hash of an example."""
    return f"{task} refused"


def measurement_of(task: str, settings: Mapping[str, Any]) -> str:
    """Return a task and its settings as one text, the same object for equal ones."""
    return sys.intern(json.dumps([task, settings], sort_keys=True))
