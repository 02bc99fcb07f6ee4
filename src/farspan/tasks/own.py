"""What a model remembers of a user's own documents: three tests made of the text itself, judged without another model.

The context is a stretch of the text, T tokens in all, into which three facts are put at random depths:

`recall`   a passage of the text: its first 16 tokens are the cue, and the greedy hits among its next 32 are counted.
`pairs`    the line "The number of {word} is {number}.", among as many others with other words and numbers. Asked for
           the word's number; right if greedy decoding gives all of it.
`cloze`    a sentence of the text. Asked which word is missing from it; right if, of its own word and three words that
           the context holds as well, the one whose log-probability the context raised most is its own:

               argmax_w  log p(w | context, question) - log p(w | question)

           (calibrated as in Holtzman et al. 2021, arXiv 2104.08315: it is not enough to be a likely word).

All three are asked of one reading. The facts and their depths are the same at every length, so that lengths differ by
how much else was read; a longer context goes on where a shorter one ends. `control` is what the same questions get with
nothing read. Synthetic needles are as old as Kamradt 2023 and the key-value lists of Liu et al. 2023, arXiv
2307.03172; ours are hidden in the user's text and use its words. A length is T; the separator is not counted.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.lm import LM
from farspan.reader import Memory, Reader
from farspan.spelling import closest, written
from farspan.tasks.base import Example, Quality, Result, Work
from farspan.tasks.passages import joined, parted, places, row
from farspan.tasks.prompts import encoded, token_texts
from farspan.text.corpora import Corpus, load

TESTS = ("recall", "pairs", "cloze")
CUE = 16  # tokens of the recalled passage that are given
TARGET = 32  # tokens of it that are asked for
FACTS = 512  # tokens of the text that the facts are taken from; at most as many as the shortest length
PAIRS = 4
OPTIONS = 4
NEARBY = 16  # tokens
ALIKE = 1e-3  # nats: less is rounding
WORD = re.compile(r"[^\W\d_]{4,}")
SENTENCE = re.compile(r"[^.!?\n]+[.!?]?")


class UnfitError(ValueError):
    """A window of a text that no question can be made of."""


@dataclass(frozen=True)
class Answer:
    """What a memory expects of one test."""

    nats: np.ndarray  # [answers], the right one first; NaN where the model gave no numbers
    hit: float  # of the right one: its share of greedy hits for recall, else 1 if all of it is


@dataclass(frozen=True)
class Own:
    """Recall, key-value and cloze tests in windows of a text."""

    text: Corpus
    tests: tuple[str, ...] = TESTS
    pairs: int = PAIRS  # the one that is asked for among them

    name: ClassVar[str] = "own"
    version: ClassVar[int] = 2

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "tests": list(self.tests),
            "pairs": self.pairs,
            "text": self.text.name,
            "text_hash": self.text.hash,
        }

    def num_tokens(self, lm: LM, length: int) -> int:
        """Tokens fed, with the longest question of the examples last made."""
        return len(lm.separator.ids) + length + self._longest["question"]

    @cached_property
    def _longest(self) -> dict[str, int]:
        """Tokens of the longest question with an answer: filled by `examples`."""
        return {}

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example]:
        """A window of the text for each repeat, with its facts and questions. Windows without enough words are passed
        over.

        Raises:
            ValueError: a text too short or with too few words, or lengths too short for the facts.
        """
        facts = min(FACTS, lengths[0])
        examples: list[Example] = []
        unfit: list[UnfitError] = []
        while len(examples) < repeats:
            first = len(examples) + len(unfit)
            try:
                windows = self.text.windows(lengths[-1] + facts, repeats + len(unfit), seed)
            except ValueError as error:
                raise unfit[-1] if unfit else error from error
            for tokens in windows[first:]:
                try:
                    one = self._example(lm, tokens[:-facts], tokens[-facts:], len(examples), lengths, seed)
                    examples.append(one)
                except UnfitError as error:
                    unfit.append(error)
        self._longest["question"] = max(
            int(ends[0] + np.diff(ends).max()) - 1
            for example in examples
            for ends in (example.tokens[f"{test}_ends"] for test in self.tests)
        )
        return examples

    def _example(
        self, lm: LM, filler: np.ndarray, source: np.ndarray, repeat: int, lengths: Sequence[int], seed: int
    ) -> Example:
        rng = np.random.default_rng([seed, repeat])
        always = lm.tokenizer.decode(filler[: lengths[0] // 4].tolist())  # of the text, whatever the length
        facts: list[tuple[float, np.ndarray]] = []  # depth, tokens
        asked: dict[str, list[np.ndarray]] = {}  # the question, then what may answer it, the right one first
        line = encoded(lm.tokenizer, "\n")
        if "recall" in self.tests:
            recalled = source[: CUE + TARGET]
            if len(recalled) < CUE + TARGET:
                raise ValueError(
                    f"a length of {lengths[0]} tokens is too short: recall hides {CUE + TARGET} of them; give longer "
                    "lengths (--lengths)"
                )
            facts.append((rng.random(), np.concatenate([line, recalled, line])))
            asked["recall"] = [recalled[:CUE], recalled[CUE:]]
        if "pairs" in self.tests:
            words = rng.permutation(self._words(always, self.pairs))[: self.pairs]
            numbers = rng.choice(90_000, self.pairs, replace=False) + 10_000
            for word, number in zip(words, numbers, strict=True):
                facts.append((rng.random(), encoded(lm.tokenizer, f"\nThe number of {word} is {number}.\n")))
            whole = encoded(lm.tokenizer, f"\nThe number of {words[0]} is {numbers[0]}")
            cue = encoded(lm.tokenizer, f"\nThe number of {words[0]} is")
            # where the number's first token reaches into the question, the question ends before it
            same = int(np.argmin([*(whole[: len(cue)] == cue[: len(whole)]), False]))
            asked["pairs"] = [whole[:same], whole[same:]]
        if "cloze" in self.tests:
            sentence, word = self._sentence(lm.tokenizer.decode(source[CUE + TARGET :].tolist()), rng)
            others = [other for other in self._words(always, OPTIONS) if other.lower() != word.lower()]
            like = [other for other in others if other[0].isupper() == word[0].isupper()]
            few = len(like) < OPTIONS - 1
            options = [word, *rng.permutation(others if few else like)[: OPTIONS - 1]]
            blank = re.sub(rf"\b{word}\b", "____", sentence)
            question = f"\nQuestion: Which word is missing here? {blank}\nAnswer:"
            facts.append((rng.random(), encoded(lm.tokenizer, f"\n{sentence}\n")))
            asked["cloze"] = [encoded(lm.tokenizer, question), *(encoded(lm.tokenizer, f" {one}") for one in options)]
        pieces, ends = joined([piece for _, piece in facts])
        if len(pieces) > lengths[0] * 3 // 4:
            raise ValueError(
                f"a length of {lengths[0]} tokens is too short: its facts have {len(pieces)}; give lengths "
                f"from {len(pieces) * 4 // 3 + 1} on (--lengths), or one test alone (own:tests=recall)"
            )
        given = {"filler": filler, "facts": pieces, "fact_ends": ends, "depths": np.array([d for d, _ in facts])}
        for test, parts in asked.items():
            given[test], given[f"{test}_ends"] = joined(parts)
        digest = hashlib.sha256(f"{self.name} {self.version} {lm.separator.ids}".encode())
        for name, values in given.items():
            digest.update(name.encode() + values.tobytes())
        return Example(digest.hexdigest()[:16], repeat, tuple(lengths), given)

    def _words(self, text: str, least: int) -> list[str]:
        """Different words of a stretch of text, in order, without those at its ends, which may be cut."""
        found = list({word.lower(): word for word in WORD.findall(text)[1:-1]}.values())
        if len(found) <= least:
            raise UnfitError(
                f"text {self.text.name!r} has a stretch with {len(found)} different words of four letters; "
                f"{least + 1} are needed: give longer lengths, or ask for tests=recall"
            )
        return found

    def _sentence(self, text: str, rng: np.random.Generator) -> tuple[str, str]:
        """A sentence of a text, at most 30 words of it, and a word of it to be left out: a name if there is one."""
        sentences = [" ".join(one.split()[:30]) for one in SENTENCE.findall(text)[1:-1]]
        several = [
            (one, WORD.findall(one)) for one in sentences if len(one.split()) >= 6 and len(WORD.findall(one)) > 1
        ]
        if not several:
            whole = " ".join(text.split()[1:-1][:30])
            several = [(whole, WORD.findall(whole))]
        sentence, words = several[int(rng.integers(len(several)))]
        if not words:
            raise UnfitError(f"text {self.text.name!r} has a stretch without words: ask for tests=recall")
        names = [word for word in words[1:] if word[0].isupper()]
        return sentence, str(rng.choice(names or words))

    def work(self, lm: LM, example: Example) -> Iterator[Work]:
        separator = len(lm.separator.ids)
        for before in (separator, *(separator + length for length in example.lengths)):
            yield Work(1, 0, before, 0)
            for test in self.tests:
                ends = example.tokens[f"{test}_ends"]
                for answer in np.diff(ends):
                    yield Work(1, before, int(ends[0] + answer) - 1, int(answer))

    def context(self, lm: LM, example: Example, length: int) -> tuple[np.ndarray, list[int]]:
        """The tokens of a length, and where in them each fact begins: before a word, if one begins nearby."""
        given = example.tokens
        facts = parted(given["facts"], given["fact_ends"], len(given["fact_ends"]))
        filler = given["filler"][: length - len(given["facts"])]
        places = [_before_a_word(lm, filler, round(depth * len(filler))) for depth in given["depths"]]
        parts, begins, done, total = [], [0] * len(facts), 0, 0
        for which in np.argsort(places, kind="stable"):
            parts += [filler[done : places[which]], facts[which]]
            begins[which] = total + places[which] - done
            done, total = places[which], begins[which] + len(facts[which])
        return np.concatenate([*parts, filler[done:]]), begins

    def run(self, reader: Reader, batch: Sequence[Example]) -> Iterator[Result]:
        """Results of examples one by one, shortest length first."""
        head = torch.tensor([reader.lm.separator.ids])
        alone = [self._answers(reader.read(head=head), example) for example in batch]
        for length in batch[0].lengths:
            for example, without in zip(batch, alone, strict=True):
                tokens, begins = self.context(reader.lm, example, length)
                memory = reader.read(row(tokens), head=head)
                within = self._answers(memory, example)
                answers = within, without
                failed = [t for t in self.tests if not all(np.isfinite(found[t].nats).all() for found in answers)]
                scores: dict[str, Any] = {"context": head.shape[1] + length, **places(memory)}
                if not failed:
                    judged, control = (_judged(found, without) for found in answers)
                    scores |= {"right": float(np.mean(list(judged.values()))), **judged}
                    scores |= {"control": float(np.mean(list(control.values())))}
                    scores |= {"nats": {test: found.nats.tolist() for test, found in within.items()}}
                    scores |= {"control_nats": {test: found.nats.tolist() for test, found in without.items()}}
                    scores |= {"distance": self._distances(length, begins), "answers": self._texts(reader.lm, example)}
                yield Result(
                    example,
                    length,
                    scores=scores,
                    status="nan" if failed else "ok",
                    reason=f"no finite log-probabilities: {', '.join(failed)}" if failed else "",
                    num_seen=memory.num_seen,
                    num_kept=memory.num_kept,
                )

    def _answers(self, memory: Memory, example: Example) -> dict[str, Answer]:
        found = {}
        for test in self.tests:
            whole, ends = example.tokens[test], example.tokens[f"{test}_ends"]
            question, *answers = parted(whole, ends, len(ends))
            scored = [
                memory.score(row(np.concatenate([question, answer])), slice(len(question), None)) for answer in answers
            ]
            hits = (scored[0].rank[0] == 0).cpu().numpy()
            nats = np.array([float(one.nats.double().sum()) for one in scored])
            found[test] = Answer(nats, float(hits.mean() if test == "recall" else hits.all()))
        return found

    def _texts(self, lm: LM, example: Example) -> dict[str, list[str]]:
        """Of each test, the question and what may answer it, the right one first."""
        given = example.tokens
        return {
            test: [lm.tokenizer.decode(ids.tolist()) for ids in parted(given[test], ends, len(ends))]
            for test, ends in ((test, given[f"{test}_ends"]) for test in self.tests)
        }

    def _distances(self, length: int, begins: Sequence[int]) -> dict[str, int]:
        """Tokens from where each fact that is asked for begins to the end of the context."""
        where = {"recall": 0, "pairs": int("recall" in self.tests), "cloze": len(begins) - 1}
        return {test: length - begins[where[test]] for test in self.tests}

    def shown(self, lm: LM, example: Example, length: int) -> dict[str, Any]:
        """The last test of an example in words: its parts, token by token; the last `scored` are the right answer."""
        test = self.tests[-1]
        question, answer = parted(example.tokens[test], example.tokens[f"{test}_ends"], 2)
        parts = [
            ["separator", token_texts(lm.tokenizer, lm.separator.ids)],
            ["read", token_texts(lm.tokenizer, self.context(lm, example, length)[0])],
            ["asked", token_texts(lm.tokenizer, np.concatenate([question, answer]))],
        ]
        return {"length": length, "repeat": example.repeat, "parts": parts, "scored": len(answer)}


@dataclass(frozen=True)
class OwnQuestion:
    """Tests made of the text itself."""

    tests: str = "all"  # or one of TESTS
    pairs: int = PAIRS  # the one that is asked for among them

    unit: ClassVar[str] = "tokens"
    quality: ClassVar[Quality] = Quality("right", "right answers", higher_is_better=True)
    details: ClassVar[tuple[str, ...]] = ("control", *TESTS)

    def __post_init__(self) -> None:
        if self.tests not in ("all", *TESTS):
            hint = closest(self.tests, TESTS)
            raise ValueError(f"tests {self.tests!r} are unknown{hint}; known are all, {', '.join(TESTS)}")
        if self.pairs < 1:
            raise ValueError(f"pairs = {self.pairs}; at least 1 is needed")

    def __str__(self) -> str:
        return written("own", self)

    def on(self, lm: LM, text: str) -> Own:
        return Own(load(text, lm.tokenizer), TESTS if self.tests == "all" else (self.tests,), self.pairs)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Powers of two from a quarter of the smallest trained length to twice the largest, but not under 512."""
        first = max(512, min(trained) // 4)
        return tuple(first << i for i in range(max(1, (2 * max(trained) // first).bit_length())))


def _judged(found: dict[str, Answer], without: dict[str, Answer]) -> dict[str, float]:
    """Of each test, between 0 and 1. Options that were raised alike share what the best of them gets."""
    judged = {test: one.hit for test, one in found.items()}
    if "cloze" in found:
        raised = without["cloze"].nats - found["cloze"].nats
        best = raised > raised.max() - ALIKE
        judged["cloze"] = float(best[0] / best.sum())
    return judged


def _before_a_word(lm: LM, tokens: np.ndarray, place: int) -> int:
    """The last place up to this one, not far from it, whose token begins with a blank; this one if there is none."""
    first = max(0, place - NEARBY)
    found = [i for i, text in enumerate(token_texts(lm.tokenizer, tokens[first : place + 1])) if text[:1].isspace()]
    return first + found[-1] if found else place
