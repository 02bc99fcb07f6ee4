"""Three memory tests on a user's own documents, made of the text itself and judged without another model.

The context is T tokens of the text in all, including the facts of the tests, inserted at random depths:

`recall`   a passage of the text: its first 16 tokens are the cue; the score is the share of greedy hits in its next 32.
`pairs`    the line "The number of {word} is {number}.", and other such lines with other words and numbers. The question
           is the word's number; right if greedy decoding gives all of it. With questions=paraphrased the question is
           in other words than the line, so that continuing a copied sentence does not answer it; right if, of the
           numbers in all lines, the context raised the log-probability of this word's number most, as for `cloze`.
`cloze`    a sentence of the text. The question is which word is missing from it; right if, of this word and three other
           words of the context, the context raised the log-probability of this word most:

               argmax_w  log p(w | context, question) - log p(w | question)

           (calibrated as in Holtzman et al. 2021, arXiv 2104.08315: it is not enough to be a likely word).

All three are scored on one reading. The facts and their depths are the same at every length, so that lengths differ
only in the amount of other text; that of a longer length begins with that of a shorter one. `control` is the score of
the same questions without the context. Synthetic needles are known from Kamradt 2023, key-value lists from Liu et al.
2023, arXiv 2307.03172; ours are hidden in the user's text and use its words. A length is T; the separator is not
counted.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.lengths import doubled_lengths
from farspan.lm import LM
from farspan.reader import Memory, Reader
from farspan.specs import choice, limited
from farspan.tasks.base import BoundText, Example, Parts, Quality, Result, Task, Work, digest
from farspan.tasks.facts import Fact, inserted
from farspan.tasks.passages import joined, places, row
from farspan.text.corpora import Corpus
from farspan.text.names import described
from farspan.text.prompts import continued, following
from farspan.text.retrieval import combining_marks

TESTS = ("recall", "pairs", "cloze")
CUE = 16  # tokens of the recalled passage that are given
TARGET = 32  # tokens of it that are scored
FACTS = 512  # tokens of the text from which facts are taken; at most the shortest length
PAIRS = 4
QUESTIONS = ("same", "paraphrased")
PARAPHRASES = (
    "\nQuestion: Which figure belongs to {word}?\nAnswer:",
    "\nWhoever asks about {word} hears the answer",
    "\nLook up {word} in the list and read out the entry:",
    "\nTo {word} they had assigned",
)
OPTIONS = 4
ALIKE = 1e-3  # nats; smaller differences are rounding
SENTENCE = re.compile(r"[^.!?\n]+[.!?]?")


class UnfitError(ValueError):
    """A window of a text has too few words for a question."""


@dataclass(frozen=True)
class AnswerScores:
    """The log-probabilities and hits of one test."""

    nats: np.ndarray  # [answers], -log p of each answer, the right one first; NaN if the model's output is not finite
    hit: float  # of the right answer: for recall the share of greedy hits, else 1 if all tokens are hits, or 0


@dataclass(frozen=True)
class Query:
    """The question of one test and its possible answers, the right one first."""

    ids: np.ndarray
    answers: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Hidden:
    """One window of the text, the facts to insert into it, and a query for each test."""

    filler: np.ndarray
    facts: tuple[Fact, ...]
    queries: Mapping[str, Query]

    @property
    def num_facts(self) -> int:
        """The number of tokens of all facts."""
        return sum(len(fact.ids) for fact in self.facts)

    @property
    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all parts by name, for a hash."""
        facts, ends = joined([fact.ids for fact in self.facts])
        yield from {"filler": self.filler, "facts": facts, "fact_ends": ends}.items()
        yield "depths", np.array([fact.depth for fact in self.facts]).view(np.int64)  # `digest` hashes integers
        for test, query in self.queries.items():
            whole, ends = joined([query.ids, *query.answers])
            yield from {test: whole, f"{test}_ends": ends}.items()


@dataclass(frozen=True)
class Own(Task):
    """Recall, key-value and cloze tests in windows of the text."""

    tests: str = choice(("all", *TESTS), "all")
    pairs: int = limited(PAIRS, 1)  # lines of the test `pairs`, with the queried one
    questions: str = choice(QUESTIONS, "same", quiet=True)  # of the test `pairs`

    name: ClassVar[str] = "own"
    details: ClassVar[tuple[str, ...]] = ("control", *TESTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = [f"pairs={self.pairs}"] if self.pairs != PAIRS else []
        unused += [f"questions={self.questions}"] if self.questions != "same" else []
        if unused and "pairs" not in self.chosen:
            raise ValueError(
                f"{', '.join(unused)} has no effect on tests={self.tests}: use tests=pairs or all, or leave it out"
            )
        if self.questions != "same" and self.pairs < 2:
            raise ValueError(f"pairs: got {self.pairs}, expected at least 2, among which questions=paraphrased chooses")

    @property
    def quality(self) -> Quality:
        # recall and a mean over tests are shares; the other tests are right or wrong
        return Quality("right", "right answers", higher_is_better=True, graded=self.tests in ("all", "recall"))

    @property
    def chosen(self) -> tuple[str, ...]:
        return TESTS if self.tests == "all" else (self.tests,)

    def on(self, lm: LM, text: str) -> "BoundOwn":
        return BoundOwn.of(self, lm, text)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return a quarter of the smallest trained length, but at least 512, and its doublings to twice the largest."""
        return doubled_lengths(max(512, min(trained) // 4), trained)


@dataclass(frozen=True, kw_only=True)
class BoundOwn(Own, BoundText[Hidden]):
    """The tests in one text."""

    task: ClassVar[str] = "own"
    reads_together: ClassVar[bool] = False
    version: ClassVar[int] = 5

    @property
    def settings(self) -> dict[str, Any]:
        how = {} if self.questions == "same" else {"questions": self.questions}
        return {"tests": list(self.chosen), "pairs": self.pairs, **how, **self.text.named}

    def windows_read(self, lm: LM, lengths: Sequence[int], repeats: int) -> list[tuple[Corpus, int, int]]:
        return [(self.text, lengths[-1] + min(FACTS, lengths[0]), repeats)]

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[Hidden]]:
        """Return a window of the text for each repeat, with its facts and queries. Windows with too few words are left
        out.

        Raises:
            ValueError: a text too short or with too few words, or lengths too short for the facts.
        """
        facts = min(FACTS, lengths[0])
        examples: list[Example[Hidden]] = []
        unfit = UnfitError()
        for tokens in self.text.every_window(lengths[-1] + facts, repeats, seed, facts):
            try:
                examples.append(self._example(lm, tokens[:-facts], tokens[-facts:], len(examples), lengths, seed))
            except UnfitError as error:
                unfit = error
            if len(examples) == repeats:
                return examples
        raise unfit

    def _example(
        self, lm: LM, filler: np.ndarray, source: np.ndarray, repeat: int, lengths: Sequence[int], seed: int
    ) -> Example[Hidden]:
        rng = np.random.default_rng([seed, repeat])
        always = lm.tokenizer.decode(filler[: lengths[0] // 4].tolist())  # from the text that every length includes
        facts: list[Fact] = []
        queries: dict[str, Query] = {}
        [line] = continued(lm.tokenizer, "\n")
        if "recall" in self.chosen:
            recalled = source[: CUE + TARGET]
            if len(recalled) < CUE + TARGET:
                raise ValueError(
                    f"a length of {lengths[0]} tokens is too short: recall hides {CUE + TARGET} of them; give longer "
                    "lengths (--lengths)"
                )
            facts.append(Fact(rng.random(), np.concatenate([line, recalled, line])))
            queries["recall"] = Query(recalled[:CUE], (recalled[CUE:],))
        if "pairs" in self.chosen:
            words = rng.permutation(self._words(always, self.pairs))[: self.pairs]
            numbers = rng.choice(90_000, self.pairs, replace=False) + 10_000
            for word, number in zip(words, numbers, strict=True):
                facts.append(Fact(rng.random(), *continued(lm.tokenizer, f"\nThe number of {word} is {number}.\n")))
            queries["pairs"] = self._pairs_query(lm, words[0], numbers, rng)
        if "cloze" in self.chosen:
            sentence, word = self._sentence(lm.tokenizer.decode(source[CUE + TARGET :].tolist()), rng)
            others = [other for other in self._words(always, OPTIONS) if other.lower() != word.lower()]
            like = [other for other in others if other[0].isupper() == word[0].isupper()]
            few = len(like) < OPTIONS - 1
            options = [word, *rng.permutation(others if few else like)[: OPTIONS - 1]]
            blank = _word().sub(lambda found: "____" if found[0] == word else found[0], sentence)
            question = f"\nQuestion: Which word is missing here? {blank}\nAnswer:"
            facts.append(Fact(rng.random(), *continued(lm.tokenizer, f"\n{sentence}\n")))
            queries["cloze"] = _query(lm, question, options)
        hidden = Hidden(filler, tuple(facts), queries)
        if hidden.num_facts > lengths[0] * 3 // 4:
            raise ValueError(
                f"a length of {lengths[0]} tokens is too short: its facts have {hidden.num_facts}; give lengths "
                f"from {hidden.num_facts * 4 // 3 + 1} on (--lengths), or one test alone (own:tests=recall)"
            )
        parts = (part for named in hidden.named for part in named)
        what = f"{self.task} {self.version} {lm.separator.ids}"
        return Example(digest(what, *parts), repeat, tuple(lengths), hidden)

    def _pairs_query(self, lm: LM, word: str, numbers: np.ndarray, rng: np.random.Generator) -> Query:
        """Return the question for the number of a word, `numbers[0]`; if paraphrased, with all numbers as answers."""
        if self.questions == "paraphrased":
            question = PARAPHRASES[int(rng.integers(len(PARAPHRASES)))].format(word=word)
            return _query(lm, question, numbers)
        ids, number = continued(lm.tokenizer, f"\nThe number of {word} is", f" {numbers[0]}")
        return Query(ids, (number,))

    def _words(self, text: str, least: int) -> list[str]:
        """Return the different words of a text, in order, without its first and last word, which may be cut."""
        found = list({word.lower(): word for word in _word().findall(text)[1:-1]}.values())
        if len(found) <= least:
            raise UnfitError(
                f"{described(self.text.name)} has a stretch with {len(found)} different words of four letters or more; "
                f"{least + 1} are needed: give a longer text or lengths, or use tests=recall"
            )
        return found

    def _sentence(self, text: str, rng: np.random.Generator) -> tuple[str, str]:
        """Return a sentence of a text, at most 30 words, and a word of it to leave out: one with an initial capital, if
        there is one after the first."""
        sentences = [" ".join(one.split()[:30]) for one in SENTENCE.findall(text)[1:-1]]
        found = [(one, _word().findall(one)) for one in sentences if len(one.split()) >= 6]
        several = [(one, words) for one, words in found if len(words) > 1]
        if not several:
            whole = " ".join(text.split()[1:-1][:30])
            several = [(whole, _word().findall(whole))]
        sentence, words = several[int(rng.integers(len(several)))]
        if not words:
            raise UnfitError(f"{described(self.text.name)} has a stretch without words: use tests=recall")
        names = [word for word in words[1:] if word[0].isupper()]
        return sentence, str(rng.choice(names or words))

    def work(self, lm: LM, example: Example[Hidden]) -> Iterator[Work]:
        separator = len(lm.separator.ids)
        for before in (separator, *(separator + length for length in example.lengths)):
            yield Work(1, 0, before, 0)
            for query in example.payload.queries.values():
                yield from (Work(1, before, len(query.ids) + len(one) - 1, len(one)) for one in query.answers)

    def context(self, lm: LM, example: Example[Hidden], length: int) -> tuple[np.ndarray, list[int]]:
        """Return the tokens of a length, and the index of each fact: before a word, if one begins nearby."""
        facts = example.payload.facts
        filler = example.payload.filler[: length - example.payload.num_facts]
        return inserted(lm, filler, facts)

    def run(self, reader: Reader, batch: Sequence[Example[Hidden]]) -> Iterator[Result]:
        """Yield results of examples one by one, shortest length first."""
        head = torch.tensor([reader.lm.separator.ids])
        alone = [self._answers(reader.read(head=head), example) for example in batch]
        for length in batch[0].lengths:
            for example, without in zip(batch, alone, strict=True):
                tokens, begins = self.context(reader.lm, example, length)
                memory = reader.read(row(tokens), head=head)
                within = self._answers(memory, example)
                answers = within, without
                failed = [t for t in self.chosen if not all(np.isfinite(found[t].nats).all() for found in answers)]
                scores: dict[str, Any] = {"context": head.shape[1] + length, **places(memory)}
                if not failed:
                    judged, control = (_judged(found, without) for found in answers)
                    scores |= {"right": float(np.mean(list(judged.values()))), **judged}
                    scores |= {"control": float(np.mean(list(control.values())))}
                    scores |= {"nats": {test: found.nats.tolist() for test, found in within.items()}}
                    scores |= {"control_nats": {test: found.nats.tolist() for test, found in without.items()}}
                    # from the beginning of each queried fact to the end of the context: recall's is first, cloze's last
                    where = {"recall": 0, "pairs": int("recall" in self.chosen), "cloze": len(begins) - 1}
                    scores |= {"distance": {test: length - begins[where[test]] for test in self.chosen}}
                    scores |= {"answers": self._texts(reader.lm, example)}
                reason = f"no finite log-probabilities: {', '.join(failed)}" if failed else ""
                yield Result.of(example, length, memory, scores, reason)

    def _answers(self, memory: Memory, example: Example[Hidden]) -> dict[str, AnswerScores]:
        found = {}
        for test, query in example.payload.queries.items():
            scored = [
                memory.score(row(np.concatenate([query.ids, answer])), slice(len(query.ids), None))
                for answer in query.answers
            ]
            hits = (scored[0].rank[0] == 0).cpu().numpy()
            nats = np.array([float(one.nats.double().sum()) for one in scored])
            found[test] = AnswerScores(nats, float(hits.mean() if test == "recall" else hits.all()))
        return found

    def _texts(self, lm: LM, example: Example[Hidden]) -> dict[str, list[str]]:
        """Return, by test, the texts of the question and of its possible answers, the right one first."""
        return {
            test: [lm.tokenizer.decode(ids.tolist()) for ids in (query.ids, *query.answers)]
            for test, query in example.payload.queries.items()
        }

    def parts(self, lm: LM, example: Example[Hidden], length: int) -> Parts:
        """Return the parts of the last test."""
        query = example.payload.queries[self.chosen[-1]]
        last = "asked", np.concatenate([query.ids, query.answers[0]])
        read = "read", self.context(lm, example, length)[0]
        return [("separator", lm.separator.ids), read, last], len(query.answers[0])


@cache
def _word() -> re.Pattern[str]:
    """Return the pattern of a word: four or more letters, or marks on them."""
    letter = r"[^\W\d_]"
    return re.compile(rf"{letter}(?:{letter}|[{combining_marks()}]){{3,}}")


def _query(lm: LM, question: str, answers: Iterable[object]) -> Query:
    """Return the query with these answers, each tokenised as it follows the question."""
    ids = (following(lm.tokenizer, f" {answer}", before=question) for answer in answers)
    [query] = continued(lm.tokenizer, question)
    return Query(query, tuple(ids))


def _judged(found: dict[str, AnswerScores], without: dict[str, AnswerScores]) -> dict[str, float]:
    """Return the score of each test, from 0 to 1. If n answers were raised most and the right one is among them, it
    scores 1 / n."""
    judged = {test: one.hit for test, one in found.items()}
    for test, one in found.items():
        if len(one.nats) > 1:
            raised = without[test].nats - one.nats
            best = raised > raised.max() - ALIKE
            judged[test] = float(best[0] / best.sum())
    return judged
