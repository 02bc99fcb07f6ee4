"""The protocol of a task: its settings, bound to a text; its examples; their results and costs."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from farspan.lm import LM
from farspan.reader import Memory, Reader, Work
from farspan.schema.row import Row, measurement_of
from farspan.specs import check_settings, written
from farspan.text.corpora import Corpus, load
from farspan.text.prompts import line_ends, token_texts

P = TypeVar("P")
Parts = tuple[Sequence[tuple[str, Sequence[int] | np.ndarray]], int]  # of a readable example, see `Bound.parts`


@dataclass(frozen=True)
class Example(Generic[P]):
    """One repeat, scored at several lengths and depths."""

    id: str  # hash of its tokens and settings
    repeat: int
    lengths: tuple[int, ...]  # in the task's unit, ascending
    payload: P  # the tokens, as the task needs them
    depths: tuple[float, ...] = (0.0,)  # of the text: 0 its beginning, 1 its end
    stops: tuple[int, ...] = ()  # ascending: lengths at which step-by-step reading pauses; see `cuts`

    @property
    def cuts(self) -> tuple[int, ...]:
        """Lengths at which reading pauses: all lengths of the measurement, including those not scored now, since in low
        precision different cuts give different sums."""
        return self.stops or self.lengths


@dataclass(frozen=True)
class Result:
    """The scores of an example at one length and depth; `measure_cell` makes a row of it."""

    example: Example[Any]
    length: int
    depth: float = 0.0
    scores: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    num_seen: int = 0
    num_kept: int = 0

    @classmethod
    def of(
        cls,
        example: Example[Any],
        length: int,
        memory: Memory,
        scores: dict[str, Any],
        failed: str = "",
        depth: float = 0.0,
    ) -> "Result":
        """Return the result of a scored memory; `failed`: the reason if its status is "nan"."""
        status = "nan" if failed else "ok"
        return cls(example, length, depth, scores, status, failed, memory.num_seen, memory.num_kept)


@dataclass(frozen=True)
class Quality:
    """The score of a row that a comparison ranks by; a mean over examples."""

    # its key in a row's scores; or a dotted path into nested ones, which are averaged; or "A - B", a difference of two
    score: str
    name: str  # as a table prints it, with its unit
    higher_is_better: bool | None  # None: neither direction is better
    exp: bool = False  # shown as exp(mean): perplexity, of nats
    graded: bool = False  # examples score between 0 and 1 (rouge, F1, a share), not only right or wrong


class Task(ABC):
    """The settings of a task: a frozen dataclass that `str` writes as `perplexity:targets=last` and `task` parses.

    `on` binds it to a text, as a method's `on` makes its reader.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = "tokens"  # of a length: tokens, passages or demonstrations
    details: ClassVar[tuple[str, ...]] = ()  # further scores that a table shows
    same_at_depths: ClassVar[bool] = False  # the questions at all depths of an example have the same text or answer

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    @abstractmethod
    def quality(self) -> Quality: ...

    @property
    def row_task(self) -> str:
        """The task recorded in its rows: tasks that share a measurement share the name."""
        return self.name

    @property
    def reads_text(self) -> bool:
        """Whether it reads the text of the measurement, and not only texts or data of its own."""
        return True

    @abstractmethod
    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return the default lengths for models trained on these contexts (tokens); the same for all of them."""

    @abstractmethod
    def on(self, lm: LM, text: str) -> "Bound[Any]":
        """Bind the task to a text, tokenised for the model. It ignores `text` unless `reads_text`.

        Raises:
            ValueError: a text or data set that cannot be read, or a setting that is open: see `resolved`.
        """

    def refuse_open(self, **settings: Any) -> None:
        """Raise ValueError if one of these settings is not chosen."""
        if names := [name for name, value in settings.items() if value is None]:
            raise ValueError(
                f"{self.name}: got no {' and '.join(names)}, whose default depends on the lengths. Give it, or bind "
                "task.resolved(lengths, trained)"
            )

    def resolved(self, lengths: Sequence[int] | None, trained: Sequence[int]) -> Self:
        """Return the task with open settings chosen for these lengths; without lengths, for models trained on these
        contexts."""
        return self

    def check(self, lengths: Sequence[int]) -> None:  # noqa: B027  most tasks need the text to decide
        """Raise ValueError if the task cannot be measured at one of these lengths with any text."""

    def __str__(self) -> str:
        return written(self.name, self)


class Bound(ABC, Generic[P]):
    """A task with its text or data: makes examples, and scores them on a reader."""

    task: ClassVar[str]  # recorded in its rows
    adaptive: ClassVar[bool] = False  # whether `farspan.measuring.adaptive` can choose its lengths
    needs_nats: ClassVar[bool] = True  # it needs the log-probability of every scored token, not only the hits
    reads_together: ClassVar[bool] = True  # the examples of a batch; otherwise one after the other
    version: ClassVar[int]  # incremented by changes that affect numbers

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All settings that affect the scores, for the record."""

    @property
    def measurement(self) -> str:
        """The task with its settings, as `Row.measurement`."""
        return measurement_of(self.task, self.settings)

    def row(self, lm: LM, method: str, seed: int, **fields: Any) -> Row:
        """Return a row of this task on a model under a method.

        Args:
            method: as `farspan.method` parses it.
            fields: the other fields of the row.
        """
        return Row(lm.name, method, self.task, self.version, self.settings, seed=seed, **fields)

    @property
    def texts(self) -> tuple[Corpus, ...]:
        """The texts read."""
        return ()

    def windows_read(self, lm: LM, lengths: Sequence[int], repeats: int) -> list[tuple[Corpus, int, int]]:
        """Return each text of which `examples` reads windows as long as the longest length, with their number of tokens
        and how many are sampled."""
        return []

    @abstractmethod
    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[P]]: ...

    def examples_at(
        self, lm: LM, lengths: Sequence[int], repeats: int, seed: int, sampled: Sequence[int] | None = None
    ) -> list[Example[P]]:
        """Return the examples at some of the lengths for which their texts are sampled.

        Args:
            sampled: all of these lengths, with those of the other models of a run; None: `lengths`. Texts depend on the
                longest.
        """
        if sampled is None or sampled[-1] == lengths[-1]:
            return self.examples(lm, lengths, repeats, seed)
        every = self.examples(lm, (*lengths, sampled[-1]), repeats, seed)
        kept = [(one, tuple(n for n in one.lengths if n in lengths)) for one in every]
        return [self.shortened(lm, one, some) for one, some in kept if some]

    def shortened(self, lm: LM, example: Example[P], lengths: tuple[int, ...]) -> Example[P]:
        """Return the example at these of its lengths only."""
        return replace(example, lengths=lengths)

    def num_tokens(self, lm: LM, example: Example[P], length: int) -> int:
        """Return the largest number of tokens fed at this length: the whole context."""
        return max(w.num_before + w.num_tokens for w in self.work(lm, replace(example, lengths=(length,), stops=())))

    @abstractmethod
    def work(self, lm: LM, example: Example[P]) -> Iterable[Work]:
        """Yield the work of `run` for this example, in order."""

    def work_of_batch(self, lm: LM, example: Example[P]) -> Iterable[Work]:
        """Yield the work that `run` does once for a batch, given one of its examples, in addition to theirs."""
        return ()

    @abstractmethod
    def run(self, reader: Reader, batch: Sequence[Example[P]]) -> Iterator[Result]:
        """Yield a result for each length, depth and example, in this order, as soon as it is known. The examples have
        the same lengths and depths."""

    def parts(self, lm: LM, example: Example[P], length: int) -> Parts | None:
        """Return the example's token ids at one length in parts, each with its kind ("separator", "read" or "asked"),
        and how many of the last tokens are scored, a right answer, or the query of an attention task; None: random
        tokens, which are not shown."""
        return None

    def shown(self, lm: LM, example: Example[P], length: int) -> dict[str, Any] | None:
        """Return a readable example at one length, as `farspan.report.example` reads it; None if it is not shown."""
        if (found := self.parts(lm, example, length)) is None:
            return None
        parts, scored = found
        texts = [[kind, token_texts(lm.tokenizer, ids)] for kind, ids in parts if len(ids)]
        return {"length": length, "repeat": example.repeat, "parts": texts, "scored": scored}

    def separator(self, lm: LM) -> tuple[int, ...]:
        """Return the token ids that begin every context."""
        return lm.separator.ids

    def chat(self, lm: LM) -> str | None:
        """Return a hash of the text that the chat template puts around prompts; None: they do not use it."""
        return None

    def ends(self, lm: LM) -> list[int] | None:
        """Return the model's tokens that end an answer; None: no answers are generated."""
        return None

    def auto_lengths(self, lm: LM, repeats: int, *, quiet: bool = False) -> tuple[int, ...] | None:
        """Return the lengths for this model alone, no longer than its positions and the text allow; None: the task's
        own `lengths`.

        Args:
            quiet: print no notice.
        """
        return None

    def batch(self, longest: int) -> int | None:
        """Return how many repeats to read together; None: as an estimate of memory allows."""
        return None

    def chunk(self, lm: LM, longest: int) -> int | None:
        """Return the tokens of one forward; None: the reader's own."""
        return None

    def around(self, reader: Reader) -> AbstractContextManager[None]:
        """Return a context manager in which a plan's trial forwards cost as much as the task's.

        Raises:
            ValueError: a reader that the task cannot measure.
        """
        return nullcontext()


@dataclass(frozen=True, kw_only=True)
class BoundText(Bound[P]):
    """A task bound to one text."""

    text: Corpus

    @classmethod
    def of(cls, task: Task, lm: LM, text: str) -> Self:
        """Bind a task to a text, tokenised for the model."""
        return cls(**vars(task), text=load(text, lm.tokenizer))

    @property
    def texts(self) -> tuple[Corpus, ...]:
        return (self.text,)

    def windows_read(self, lm: LM, lengths: Sequence[int], repeats: int) -> list[tuple[Corpus, int, int]]:
        return [(self.text, lengths[-1], repeats)]


def stops(lm: LM, *, one_line: bool) -> list[int]:
    """Return the ids of the tokens that end an answer: those of the model, and if `one_line` those of `line_ends`."""
    return sorted({*lm.stop_tokens, *(line_ends(lm.tokenizer) if one_line else ())})


def not_finite(tokens: int) -> str:
    """Return the reason for a row in which this many scored tokens have no finite log-probability; "" for 0."""
    return f"{tokens} scored tokens have no finite log-probability" if tokens else ""


def digest(*parts: str | np.ndarray) -> str:
    """Return 16 hexadecimal digits that identify these texts and token ids, in this order."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part.encode() if isinstance(part, str) else np.asarray(part, np.int64).tobytes())
    return hashed.hexdigest()[:16]


def distinct(examples: Iterable[Example[P]]) -> list[Example[P]]:
    """Return the examples, each with an id of its own: equal rows of data, or windows of a text, stay apart."""
    found: dict[str, Example[P]] = {}
    for one in examples:
        id = digest(one.id, str(one.repeat)) if one.id in found else one.id
        found[id] = replace(one, id=id)
    return list(found.values())
