"""Open-domain question answering: short answers from k retrieved passages, judged by exact match.

    {separator}{demonstration 1}{demonstration 2}{passage 1} ... {passage k}Question: {question}\\nAnswer:

A passage is `Document (Title: {title}): {text}`, a demonstration its first passage, its question and its first answer;
a blank line follows each. Yen et al. 2024 (CEPE), arXiv 2402.16617, section 4.2, appendix C.1 and table 7; a length of
this task is k. Greedy decoding of at most 25 tokens, to the end of the line. An answer is right if it equals one of the
references after both are lower-cased and lose punctuation, articles and extra blanks (Rajpurkar et al. 2016, arXiv
1606.05250).

Differences from the authors' scripts: theirs give CEPE and RePlug no demonstration in the decoder, the baselines two;
ours give all methods the same two, at the beginning of every decoder. Theirs sample demonstrations inside the workers
of a data loader, so that they depend on the number of workers; ours depend only on the seed and the question. A passage
that is too long loses its end here, its title there. The number of passages in CEPE's decoder is a setting of the
method.

Data: Natural Questions, TriviaQA and PopQA, as jsonl, parquet or a hub data set, with the columns

    question
    answers, answer or possible_answers   a list, text, JSON of a list, or TriviaQA's {"value", "aliases"}
    ctxs                                  [{"title", "text", "score"}], best first; not needed with an index
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from farspan.lm import LM
from farspan.reader import NotFiniteError, Reader
from farspan.specs import choice, limited
from farspan.tasks.base import Bound, Example, Parts, Quality, Result, Task, Work, digest, stops
from farspan.tasks.passages import PASSAGE_TOKENS, WEIGHTS, joined, passage_ids, passage_weights, places, row
from farspan.tasks.scoring import exact_match, normalised
from farspan.tasks.values import inside, number_of, rows_of, text_of, texts_of
from farspan.text.prompts import continued, following
from farspan.text.retrieval import UNSPACED, Index, open_index
from farspan.text.tables import read_table

SHOTS = 2
NEW_TOKENS = 25
ANSWERS = ("answers", "answer", "possible_answers")  # columns; the first that a data set has is used


@dataclass(frozen=True)
class Passage:
    """A retrieved passage; `str` writes it as in a prompt."""

    text: str
    title: str = ""
    score: float | None = None  # the retriever's
    name: str = ""  # in records: its title, or its number in an index

    def __str__(self) -> str:
        title = f" (Title: {self.title})" if self.title else ""
        return f"Document{title}: {self.text.strip()}"


@dataclass(frozen=True)
class Question:
    """One question of a data set."""

    question: str
    answers: tuple[str, ...]  # references, at least one
    passages: tuple[Passage, ...] = ()  # best first


@dataclass(frozen=True)
class QaPrompt:
    """The parts of a prompt as tokens, and its question."""

    head: np.ndarray  # the separator and the demonstrations
    passages: tuple[np.ndarray, ...]
    query: np.ndarray
    question: Question

    def num_tokens(self, length: int) -> int:
        """Return the number of tokens of the whole prompt with `length` passages."""
        return len(self.head) + sum(map(len, self.passages[:length])) + len(self.query)


@dataclass(frozen=True)
class Qa(Task):
    """Exact match of answers to a data set's questions after retrieved passages."""

    data: str  # FILE.jsonl, FILE.parquet or org/name@config:split
    demos: str | None = None  # data for demonstrations; None: other questions of `data`
    index: str | None = None  # a folder, as `farspan index` writes it; None: the passages that come with the data
    shots: int = limited(SHOTS)  # demonstrations
    passage_tokens: int = limited(PASSAGE_TOKENS, 1, quiet=True)  # of each passage, at most
    new_tokens: int = limited(NEW_TOKENS, 1, quiet=True)  # of an answer, at most
    weights: str = choice(WEIGHTS, "method", quiet=True)

    name: ClassVar[str] = "qa"
    reads_text: ClassVar[bool] = False
    unit: ClassVar[str] = "passages"
    quality: ClassVar[Quality] = Quality("exact_match", "exact match", higher_is_better=True)
    details: ClassVar[tuple[str, ...]] = ("in_passages",)

    def on(self, lm: LM, text: str) -> "BoundQa":
        questions, skipped = read_questions(self.data)
        pool = read_questions(self.demos)[0] if self.demos else questions
        opened = open_index(self.index) if self.index else None
        return BoundQa(**vars(self), questions=questions, pool=pool, skipped=skipped, opened=opened)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of passages in table 7 that all models there can read."""
        return 1, 5, 10, 15, 20


@dataclass(frozen=True, kw_only=True)
class BoundQa(Qa, Bound[QaPrompt]):
    """The questions of one data set."""

    questions: tuple[Question, ...]
    pool: tuple[Question, ...]  # of demonstrations
    skipped: int = 0  # rows of the data without a question or a reference
    opened: Index | None = None  # the index; None: the passages come with the data

    task: ClassVar[str] = "qa"
    needs_nats: ClassVar[bool] = False
    reads_together: ClassVar[bool] = False
    version: ClassVar[int] = 5

    @cached_property
    def settings(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "data_hash": self._hash,
            "questions": len(self.questions),
            "skipped": self.skipped,
            "shots": self.shots,
            "passage_tokens": self.passage_tokens,
            "new_tokens": self.new_tokens,
            "weights": self.weights,
            "index": None if self.opened is None else str(self.opened.folder),
            "index_hash": None if self.opened is None else self.opened.hash,
        }

    @property
    def _hash(self) -> str:
        every = (*self.questions, *(() if self.pool is self.questions else self.pool))
        return digest(*(repr(one).replace("Question(", "Asked(", 1) for one in every))  # its name in older records

    def ends(self, lm: LM) -> list[int] | None:
        return lm.stop_tokens

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[QaPrompt]]:
        """Return a question for each repeat; question i does not depend on the number of repeats.

        Raises:
            ValueError: fewer questions with enough passages than repeats, too few demonstrations, or an index with too
                few passages.
        """
        fitting = [i for i, one in enumerate(self.questions) if self.opened or len(one.passages) >= lengths[-1]]
        if len(fitting) < repeats:
            have, fix = f"{self.data!r} has {len(fitting)}", "choose fewer (--repeats)"
            if not self.opened:
                have += f" with at least {lengths[-1]} passages, of {len(self.questions)} in all"
                fix = "choose fewer (--repeats, --lengths), or name an index (index=FOLDER)"
            raise ValueError(f"{repeats} questions are needed, and {have}: {fix}")
        chosen = np.random.default_rng(seed).permutation(fitting)[:repeats]
        return [self._example(lm, int(which), i, lengths, seed) for i, which in enumerate(chosen)]

    def _example(self, lm: LM, which: int, repeat: int, lengths: Sequence[int], seed: int) -> Example[QaPrompt]:
        one = self.questions[which]
        head = [np.array(lm.separator.ids, np.int64)]
        for shot in self._demonstrations(which, seed):
            best = self._passages(shot, 1)
            head += [passage_ids(lm.tokenizer, str(passage), self.passage_tokens) for passage in best]
            head += continued(lm.tokenizer, f"Question: {shot.question}\nAnswer: {shot.answers[0]}\n\n")
        passages = self._passages(one, lengths[-1])
        pieces = tuple(passage_ids(lm.tokenizer, str(passage), self.passage_tokens) for passage in passages)
        [query] = continued(lm.tokenizer, f"Question: {one.question}\nAnswer:")
        prompt = QaPrompt(np.concatenate(head), pieces, query, one)
        what = f"{self.task} {self.version} {repeat} {one.answers} {self.new_tokens} {self.weights}"
        return Example(digest(what, prompt.head, *joined(pieces), query), repeat, tuple(lengths), prompt)

    @cached_property
    def _searched(self) -> dict[str, tuple[Passage, ...]]:
        """The passages found for each question, kept because a search takes long and each length needs them."""
        return {}

    def _passages(self, one: Question, count: int) -> tuple[Passage, ...]:
        if self.opened is None:
            return one.passages[:count]
        found = self._searched.get(one.question, ())
        if len(found) < count:
            numbers, scores = (values[0] for values in self.opened.search([one.question], count))
            found = tuple(
                Passage(self.opened.passage(int(n)), "", float(score), str(n))
                for n, score in zip(numbers, scores, strict=True)
            )
            self._searched[one.question] = found
        return found[:count]

    def _demonstrations(self, which: int, seed: int) -> list[Question]:
        """Return other questions as demonstrations, the same for every model and method."""
        question = normalised(self.questions[which].question)
        usable = [one for one in self.pool if self.opened or one.passages]
        if not usable and not any(one.passages for one in self.questions):
            usable = list(self.pool)  # no question has passages: asked without any
        order = np.random.default_rng([seed, which]).permutation(len(usable))
        others = (usable[i] for i in order if normalised(usable[i].question) != question)
        found = list(islice(others, self.shots))
        if len(found) < self.shots:
            raise ValueError(
                f"shots: got {self.shots} demonstrations, expected at most {len(found)}, the number of other "
                f"questions{'' if self.opened else ' with passages'}. Use fewer shots"
            )
        return found

    def work(self, lm: LM, example: Example[QaPrompt]) -> Iterator[Work]:
        for length in example.lengths:
            fed = example.payload.num_tokens(length)
            yield Work(1, 0, fed, 0, tuple(map(len, example.payload.passages[:length])))
            yield Work(1, fed, 0, 1)
            for new in range(1, self.new_tokens):  # the longest possible answer
                yield Work(1, fed + new - 1, 1, 1)

    def run(self, reader: Reader, batch: Sequence[Example[QaPrompt]]) -> Iterator[Result]:
        """Yield results, fewest passages first. Examples are read one by one, since their passages differ in length."""
        tokenizer = reader.lm.tokenizer
        stop = stops(reader.lm, one_line=True)
        for length in batch[0].lengths:
            for example in batch:
                given, one = example.payload, example.payload.question
                pieces = given.passages[:length]
                passages = self._passages(one, length)
                scores = [passage.score for passage in passages]
                if self.weights == "retriever" and None in scores:
                    raise ValueError(
                        f"{self.data!r} has passages without a score, which weights=retriever needs. Omit it"
                    )
                weights = passage_weights(self.weights, scores)
                memory = reader.read(*map(row, pieces), head=row(given.head), weights=weights)
                memory.read(row(given.query[:-1]))
                try:
                    (new,) = memory.generate(row(given.query[-1:]), self.new_tokens, stop=stop)
                except NotFiniteError as error:
                    yield Result(example, length, status="nan", reason=str(error), num_seen=memory.num_seen)
                    continue
                answer = tokenizer.decode(new.tolist(), skip_special_tokens=True).partition("\n")[0].strip()
                values = {
                    "exact_match": exact_match(answer, one.answers),
                    "answer": answer,
                    "answers": list(one.answers),
                    "question": one.question,
                    "context": given.num_tokens(length),
                    "new_tokens": len(new),
                    "head_tokens": len(given.head),
                    "passages": [passage.name for passage in passages],
                    "passage_scores": [None if score is None else round(score, 4) for score in scores],
                    "passage_tokens": [len(ids) for ids in pieces],
                    **places(memory),
                    "in_passages": float(any(_holds(tokenizer.decode(ids.tolist()), one.answers) for ids in pieces)),
                }
                yield Result.of(example, length, memory, values)

    def parts(self, lm: LM, example: Example[QaPrompt], length: int) -> Parts:
        given = example.payload
        answer = following(lm.tokenizer, f" {given.question.answers[0]}", before="Answer:")
        read = [("read", ids) for ids in (given.head, *given.passages[:length])]
        return [*read, ("asked", np.concatenate([given.query, answer]))], len(answer)


def read_questions(data: str) -> tuple[tuple[Question, ...], int]:
    """Return the questions of a data set, and how many of its rows were skipped for lack of a question or reference.

    Raises:
        ValueError: no such data, columns missing, or no question left.
    """
    table = read_table(data)
    column, references, found = table.column("question"), table.column(*ANSWERS), []
    for where, values in table.each:
        question = "" if values[column] is None else text_of(values[column], f"{where}, column {column!r}").strip()
        answers = _answers(values[references], f"{where}, column {references!r}")
        if question and answers:
            found.append(Question(question, answers, tuple(_passages(values.get("ctxs"), where))))
    if not found:
        raise ValueError(f"{data!r} holds no question with an answer ({len(table.rows)} rows). Give other data")
    return tuple(found), len(table.rows) - len(found)


def _answers(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # PopQA's
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: the answers {value[:60]!r} are not JSON: {error}") from error
    if isinstance(value, Mapping):  # TriviaQA's
        value = [value.get("value"), *rows_of(value.get("aliases") or [], f"{where}, 'aliases'")]
    listed = list(value) if isinstance(value, list | tuple) else [value]
    texts = (text.strip() for text in texts_of(listed, where, numbers=True))
    return tuple(dict.fromkeys(text for text in texts if text))


def _passages(values: Any, where: str) -> Iterator[Passage]:
    for place, one in enumerate(() if values is None else rows_of(values, f"{where}, column 'ctxs'"), 1):
        here = f"{where}, passage {place} of ctxs"
        text = text_of(inside(one, here, "text"), f"{here}, 'text'")
        title, score = text_of(one.get("title") or "", f"{here}, 'title'"), one.get("score")
        if isinstance(score, str):  # the authors' files
            try:
                score = float(score)
            except ValueError as error:
                raise ValueError(f"{here}: got a score of {score!r:.60}, expected a number") from error
        yield Passage(text, title, None if score is None else number_of(score, f"{here}, 'score'"), title)


def _holds(text: str, answers: Iterable[str]) -> bool:
    """Return whether a passage contains all words of a reference in order, both normalised. Each character of a script
    without spaces is a word."""

    def words(text: str) -> str:
        spaced = re.sub(f"([{UNSPACED}])", r" \1 ", normalised(text))
        return f" {' '.join(spaced.split())} "

    passage = words(text)
    return any(words(answer) in passage for answer in answers)
