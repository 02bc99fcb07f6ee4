"""LongBench v2: 503 multiple-choice questions about long texts (Bai et al. 2024, arXiv 2412.15204).

ask=likelihood   the letter whose answer, " (A)" to " (D)" after "The correct answer is", has the highest probability.
                 Every model gives one of the four, so it also suits models that follow no instructions. Chance is 1/4.
ask=generated    the benchmark's: at most 128 tokens are generated after its prompt, and the answer is the letter after
                 "The correct answer is", in brackets or not. Without a letter it is wrong. Greedy; theirs is sampled
                 at 0.1.

The prompt is the benchmark's without reasoning; for `ask=likelihood`, "The correct answer is" is added. It has no
chat template. The benchmark removes the middle of a prompt that is too long; here a document is cut only if `truncate`
is set (truncate=middle cuts the document alone, so that the question always stays).
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from farspan.lm import LM
from farspan.reader import Memory, NotFiniteError
from farspan.specs import choice, limited
from farspan.tasks.base import Example, Quality, Work
from farspan.tasks.documents import TRUNCATE, Answering, BoundDocuments, DocumentPrompt, DocumentTask, Item
from farspan.tasks.icl import nats_of_options
from farspan.tasks.values import text_of
from farspan.text.prompts import following
from farspan.text.tables import hub_table, read_table

ASK = ("likelihood", "generated")
LETTERS = ("A", "B", "C", "D")
DIFFICULTIES = ("easy", "hard")
SIZES = ("short", "medium", "long")  # of a text, the column "length"
COLUMNS = ("_id", "domain", "sub_domain", "difficulty", "length", "question", "answer", "context",
           *(f"choice_{letter}" for letter in LETTERS))  # fmt: skip
HUB = "THUDM/LongBench-v2"
NEW_TOKENS = 128  # the benchmark's
BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
AFTER = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}"
    '\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
BEGUN = "The correct answer is"
ANSWERS = re.compile(rf"{BEGUN} \(([A-D])\)"), re.compile(rf"{BEGUN} ([A-D])")  # a bracketed letter goes first


@dataclass(frozen=True)
class LongBench2(DocumentTask):
    """Multiple-choice questions about long texts, `longbench2:data=FILE,truncate=middle`."""

    ask: str = choice(ASK, "likelihood")
    data: str | None = None  # a file, or a folder with data.SUFFIX or train.SUFFIX; None: THUDM/LongBench-v2 on the hub
    difficulty: str | None = choice(DIFFICULTIES, None)  # of the questions; None: all
    size: str | None = choice(SIZES, None)  # of their texts; None: all
    truncate: str = choice(TRUNCATE, "none")  # the part of a long document to leave out
    new_tokens: int | None = limited(None, 1)  # at most, for ask=generated; None: the benchmark's

    name: ClassVar[str] = "longbench2"
    quality: ClassVar[Quality] = Quality("score", "accuracy", higher_is_better=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_tokens is not None and self.ask == "likelihood":
            raise ValueError("new_tokens belongs to ask=generated; ask=likelihood generates nothing: leave it out")

    def on(self, lm: LM, text: str) -> "BoundLongBench2":
        items = tuple(load_items(self.data, self.difficulty, self.size, begun=self.ask == "likelihood"))
        named = "-".join(part for part in (self.difficulty, self.size) if part) or "all"
        if self.ask == "generated":
            return BoundLongBench2(named, items, Answering(self.new_tokens or NEW_TOKENS), self.truncate)
        choices = tuple(tuple(following(lm.tokenizer, f" ({one})", before=BEGUN).tolist()) for one in LETTERS)
        how = Answering(max(map(len, choices)))
        return ByLikelihood(named, items, how, self.truncate, choices=choices)


class BoundLongBench2(BoundDocuments):
    """The questions, answered by generation."""

    task: ClassVar[str] = "longbench2"
    version: ClassVar[int] = 2
    ask: ClassVar[str] = "generated"

    @property
    def settings(self) -> dict[str, Any]:
        return {"ask": self.ask, **super().settings}

    def judged(self, prediction: str, item: Item) -> dict[str, Any]:
        answer = prediction.replace("*", "")
        letter = next((found[1] for one in ANSWERS if (found := one.search(answer))), None)
        return {"score": float(letter in item.references), "letter": letter}

    def right(self, item: Item) -> str:
        return f" {BEGUN} ({item.references[0]})"


@dataclass(frozen=True)
class ByLikelihood(BoundLongBench2):
    """The questions, answered by the probability of each letter."""

    needs_nats: ClassVar[bool] = True
    ask: ClassVar[str] = "likelihood"

    choices: tuple[tuple[int, ...], ...] = field(kw_only=True)  # token ids of each answer

    def ends(self, lm: LM) -> None:
        return None

    def answer_work(self, prompt: int) -> Iterator[Work]:
        for length, count in Counter(map(len, self.choices)).items():
            yield Work(count, prompt, length - 1, length)

    def answer(self, lm: LM, memory: Memory, example: Example[DocumentPrompt], stop: Sequence[int]) -> dict[str, Any]:
        nats = nats_of_options(memory, [np.array(ids) for ids in self.choices])
        if failed := int((~np.isfinite(nats)).sum()):
            raise NotFiniteError(f"{failed} of the {len(nats)} answers have no finite log-probability")
        letter = LETTERS[int(nats.argmin())]
        return {
            "score": float(letter in example.payload.item.references),
            "letter": letter,
            "nats": [float(one) for one in nats],
        }

    def right(self, item: Item) -> str:
        return f" ({item.references[0]})"


def load_items(data: str | None, difficulty: str | None, size: str | None, *, begun: bool) -> list[Item]:
    """Return the questions, in the benchmark's form.

    Args:
        difficulty, size: of the questions wanted; None: all.
        begun: whether the prompt ends with the beginning of an answer.

    Raises:
        ValueError: no such data, or values of another form.
    """
    table = hub_table(HUB, None, "train") if data is None else read_table(data, ("data", "train"))
    for name in COLUMNS:
        table.column(name)
    items = [
        _item(place, row, begun)
        for place, row in table.each
        if difficulty in (None, row["difficulty"]) and size in (None, row["length"])
    ]
    if not items:
        wanted = ", ".join(f"{name}={value}" for name, value in (("difficulty", difficulty), ("size", size)) if value)
        raise ValueError(f"{table.name} has no question with {wanted}: leave one out")
    return items


def _item(place: str, row: dict[str, Any], begun: bool) -> Item:
    def text(name: str) -> str:
        where = f"{place}, column {name!r}"
        if not (value := text_of(row[name], where).strip()):
            raise ValueError(f"{where}: got an empty text, expected one that is not")
        return value

    if (answer := text("answer")) not in LETTERS:
        raise ValueError(f"{place}, column 'answer': got {answer!r:.60}, expected one of {', '.join(LETTERS)}")
    choices = {letter: text(f"choice_{letter}") for letter in LETTERS}
    after = AFTER.format(question=text("question"), **choices) + (f"\n\n{BEGUN}" if begun else "")
    about = {"domain": "domain", "sub_domain": "sub_domain", "difficulty": "difficulty", "size": "length"}
    fields = tuple((name, str(row[column])) for name, column in about.items())
    return Item(str(row["_id"]), BEFORE, text("context"), after, (answer,), tuple(choices.values()), fields)
