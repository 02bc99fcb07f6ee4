"""The nouns of a task: an example, what it gave, what it costs, and the task itself."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from farspan.lm import LM
from farspan.reader import Reader


@dataclass(frozen=True)
class Example:
    """One repeat over all its lengths, asked for at some depths of each."""

    id: str  # hash of its tokens and of what is asked
    repeat: int
    lengths: tuple[int, ...]  # tokens, ascending
    tokens: Mapping[str, np.ndarray]
    depths: tuple[float, ...] = (0.0,)  # of the text: 0 its beginning, 1 its end
    stops: tuple[int, ...] = ()  # tokens, ascending: where a text that is read further and further is cut; see `cuts`

    @property
    def cuts(self) -> tuple[int, ...]:
        """Lengths at which reading pauses: all lengths of the measurement, also those that are not scored now, since in
        low precision other cuts give other sums."""
        return self.stops or self.lengths


@dataclass(frozen=True)
class Result:
    """What an example gave at one length and depth; `measure` makes a row of it."""

    example: Example
    length: int
    depth: float = 0.0
    scores: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    num_seen: int = 0
    num_kept: int = 0


@dataclass(frozen=True)
class Work:
    """One stretch of tokens that some rows feed behind what they have read: what a plan adds up."""

    num_rows: int
    num_before: int  # tokens each row has read before
    num_tokens: int  # tokens each row feeds
    num_scored: int  # positions of these that need the output head


class Task(Protocol):
    name: ClassVar[str]
    version: ClassVar[int]  # a change that moves numbers bumps it

    @property
    def settings(self) -> dict[str, Any]: ...  # resolved, for the record

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example]: ...

    def num_tokens(self, lm: LM, length: int) -> int: ...  # the whole context at this length

    def work(self, lm: LM, example: Example) -> Iterable[Work]: ...  # what run will do, in order

    def run(self, reader: Reader, batch: Sequence[Example]) -> Iterator[Result]:
        ...
        # yields a result per length, depth and example, in this order, as it gets there


@dataclass(frozen=True)
class Quality:
    """The number of a row that a comparison ranks by; a mean over examples."""

    score: str  # its key in a row's scores
    name: str  # as a table says it, with its unit
    higher_is_better: bool
    exp: bool = False  # shown as exp(mean): perplexity, of nats

    @property
    def graded(self) -> bool:
        """Whether the score of one example may be anything between 0 and 1 (rouge, F1, share of tokens), not only
        right or wrong."""
        return self.score in ("score", "copy")


@runtime_checkable
class Question(Protocol):
    """A task's settings as text writes them (`perplexity:targets=last`): a frozen dataclass that `str` writes and
    `task` parses; `on` makes the task for one model, as a method's `on` makes its reader."""

    unit: ClassVar[str]  # what a length of this task counts: tokens, passages, demonstrations

    @property
    def quality(self) -> Quality: ...

    def on(self, lm: LM, text: str) -> Task:
        """The task, its text tokenised. A task with a data set of its own does without `text`."""
        ...

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """What is asked of models trained on these lengths, where none are given; the same of all of them."""
        ...
