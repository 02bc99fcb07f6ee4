"""In-context learning: classification from examples in the context. The answer is the likeliest option.

    option = argmax over options o of    log p(o | demonstrations, question)                          plain
                                         ... / tokens of o                                            normalized
                                         ... - log p(o | separator)                                   calibrated
                                         (... - log p(o | separator)) / tokens of o                   both

Eleven sets of Yen et al. 2024 (CEPE), arXiv 2402.16617, section 5, appendix C.2, tables 3 and 8, with the prompts of
their script, after Ratner et al. 2023, arXiv 2212.10947; calibration is Holtzman et al.'s domain-conditional PMI, arXiv
2104.08315, with an empty domain.

Demonstrations are balanced: among the first n of an example, the numbers of two classes differ by at most one (unless
a class has no more). They are sampled separately for each example, and a smaller number is the beginning of a larger
one. The first `head` come first (in CEPE's decoder, in each pass of RePlug); each further one is a passage. All options
are scored on one memory of demonstrations and question.

The set `copy` is generated and needs only memory: pairs of an input and an output that no rule connects. The question
is the input of one of the first n demonstrations, n being the smallest length, and is shown there once.

A data set of the user's own is given as a folder with two splits and the names of two columns (`data=FOLDER,
text=COLUMN,label=COLUMN`); its prompt uses the columns' names.

Differences from the authors' script: questions are sampled, not the first of the file; demonstrations do not depend on
the number of workers, and never include the question itself; clinic150 is run; options are tokenised as continuations
of the prompt.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from farspan.lm import LM
from farspan.reader import Memory, Reader
from farspan.record import by_key
from farspan.specs import choice, limited
from farspan.tasks.base import Bound, Example, Parts, Quality, Result, Task, Work, digest
from farspan.tasks.icl_sets import COPY, COPY_QUESTION, SETS, Labelled, copy_set, load_own, load_set, own_question
from farspan.tasks.passages import places, row
from farspan.text.prompts import following

SCORINGS = ("plain", "normalized", "calibrated", "both")
LENGTHS = (2, 20, 40)  # demonstrations, CEPE's table 3
HEAD = 2  # demonstrations that come first, CEPE's
DIGITS = 5  # of the numbers in a row; predictions use the rounded numbers


@dataclass(frozen=True)
class IclPrompt:
    """One question as tokens, with its demonstrations and options."""

    shown: tuple[np.ndarray, ...]  # demonstrations
    query: np.ndarray
    alone: np.ndarray  # the query of a prompt without demonstrations
    gold: int  # the index of the right option
    options: tuple[np.ndarray, ...]

    def parts(self, head: int, length: int) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
        """Return the first `head` demonstrations joined, the others as passages, and the query."""
        front = np.concatenate([self.query[:0], *self.shown[: min(head, length)]])
        return front, self.shown[head:length], self.query if length else self.alone


@dataclass(frozen=True)
class Icl(Task):
    """Classification from examples in the context: a known set, `icl:set=banking77,data=FOLDER`, or your own data,
    `icl:data=FOLDER,text=COLUMN,label=COLUMN`."""

    set: str | None = choice((*SETS, COPY), None)  # None: a data set of the user's own
    data: str | None = None  # a folder with its two splits; None: from the hub
    text: str | None = None  # column with the text to classify, of a data set of the user's own
    label: str | None = None  # column with its class
    scoring: str | None = choice(SCORINGS, None)  # default: CEPE's choice for the set, else plain
    head: int = limited(HEAD, quiet=True)  # demonstrations that come first; the others are passages

    name: ClassVar[str] = "icl"
    unit: ClassVar[str] = "demonstrations"
    reads_text: ClassVar[bool] = False
    quality: ClassVar[Quality] = Quality("accuracy", "accuracy", higher_is_better=True)

    def __post_init__(self) -> None:
        own = {"data": self.data, "text": self.text, "label": self.label}
        if self.set is None and (missing := [key for key, value in own.items() if value is None]):
            raise ValueError(
                "icl needs a set (set=banking77, one of "
                f"{', '.join(SETS)}) or a data set of your own (data=FOLDER,text=COLUMN,label=COLUMN); "
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing for the latter"
            )
        if self.text is not None and self.text == self.label:
            raise ValueError(f"text and label are both {self.text!r}: name the two columns of the data set")
        if self.set is not None and (self.text is not None or self.label is not None):
            raise ValueError(
                f"icl set {self.set!r} has its own columns: leave out text and label, or leave out set to read "
                "a data set of your own (data=FOLDER,text=COLUMN,label=COLUMN)"
            )
        super().__post_init__()
        if self.set == COPY and self.data is not None:
            raise ValueError(f"icl set {COPY!r} is generated: leave out data={self.data}")

    def on(self, lm: LM, text: str) -> "BoundIcl":
        if self.set is None:
            data, columns = str(self.data), (str(self.text), str(self.label))  # none is None: see __post_init__
            return BoundIcl(data, own_question(*columns), *load_own(data, *columns), self.scoring or "plain", self.head)
        if self.set == COPY:
            options, pairs = copy_set()
            return BoundIcl(COPY, COPY_QUESTION, options, pairs, pairs, self.scoring or "plain", self.head)
        known = SETS[self.set]
        pools = load_set(self.set, self.data)
        return BoundIcl(self.set, known.question, *pools, self.scoring or known.scoring, self.head)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        return LENGTHS


@dataclass(frozen=True)
class BoundIcl(Bound[IclPrompt]):
    """Accuracy on the questions of one set. A length is a number of demonstrations."""

    set: str  # one of SETS, copy, or the folder of a data set of the user's own
    question: str
    options: tuple[str, ...]
    demonstrations: tuple[Labelled, ...] = field(repr=False)
    questions: tuple[Labelled, ...] = field(repr=False)
    scoring: str = "plain"  # one of SCORINGS: its accuracy is the quality; all are recorded
    head: int = HEAD

    task: ClassVar[str] = "icl"
    reads_together: ClassVar[bool] = False
    version: ClassVar[int] = 2

    @property
    def settings(self) -> dict[str, Any]:
        how = {"scoring": self.scoring, "head": self.head, "options": len(self.options)}
        return {"set": self.set, **how, "data_hash": self._hash}

    @cached_property
    def _hash(self) -> str:
        every = [[one.text, self.options[one.label]] for one in (*self.demonstrations, *self.questions)]
        return digest(json.dumps([self.options, every]))

    def _prompt_tokens(self, lm: LM, example: Example[IclPrompt], length: int) -> int:
        front, passages, query = example.payload.parts(self.head, length)
        return len(lm.separator.ids) + len(front) + sum(map(len, passages)) + len(query)

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[IclPrompt]]:
        """Return `repeats` questions, each with demonstrations of its own.

        Raises:
            ValueError: fewer questions or demonstrations than needed; options with the same tokens.
        """
        if repeats > len(self.questions):
            raise ValueError(f"{self.set} has {len(self.questions):,} questions; {repeats:,} are needed (--repeats)")
        if self.set == COPY and lengths[0] < 1:
            raise ValueError(f"{COPY} asks for one of the demonstrations: got 0 of them. Give --lengths from 1 on")
        options = self.option_ids(lm)
        chosen = np.random.default_rng([seed]).permutation(len(self.questions))[:repeats]
        return [self._example(lm, lengths, repeat, int(index), seed, options) for repeat, index in enumerate(chosen)]

    def _example(
        self, lm: LM, lengths: Sequence[int], repeat: int, index: int, seed: int, options: list[np.ndarray]
    ) -> Example[IclPrompt]:
        question = self.questions[index]
        rng = np.random.default_rng([seed, index])
        shown = self._sampled(lengths[-1], question, rng)
        if self.set == COPY:
            shown[int(rng.integers(lengths[0]))] = question
        texts = [f"{self.question.format(one.text)} {self.options[one.label]}" for one in shown]
        last = self.question.format(question.text)
        # the empty line belongs to the text after it: some tokenizers encode it differently at the end of a text
        first, *others = texts or [""]
        parts = [following(lm.tokenizer, first, before="")] if texts else []
        parts += [following(lm.tokenizer, f"\n\n{text}", before="x") for text in others]
        query, alone = following(lm.tokenizer, f"\n\n{last}", before="x"), following(lm.tokenizer, last, before="")
        prompt = [texts, last, question.label, self.options, self.head]
        what = [self.version, repeat, *prompt, *(ids.tolist() for ids in (query, *options))]
        return Example(
            id=digest(json.dumps(what)),
            repeat=repeat,
            lengths=tuple(lengths),
            payload=IclPrompt(tuple(parts), query, alone, question.label, tuple(options)),
        )

    def _sampled(self, count: int, question: Labelled, rng: np.random.Generator) -> list[Labelled]:
        """Return demonstrations: one of each class per turn, the classes of a turn in random order."""
        classes = by_key((one.label, one) for one in self.demonstrations if one.text != question.text)
        # label -> the class's own random order, consumed only as far as needed
        orders = {label: iter(rng.permutation(len(of_class))) for label, of_class in sorted(classes.items())}
        sampled: list[Labelled] = []
        while len(sampled) < count and orders:
            for label in rng.permutation(list(orders)):
                place = next(orders[label], None)
                if place is None:
                    del orders[label]
                else:
                    sampled.append(classes[label][place])
        if len(sampled) < count:
            raise ValueError(
                f"{self.set} has {len(sampled):,} demonstrations; {count:,} are needed. Give smaller --lengths"
            )
        return sampled[:count]

    def option_ids(self, lm: LM) -> list[np.ndarray]:
        """Return the tokens of each option after a question. Where the tokens of one begin another's, which would then
        never be the more probable, all end with the token that follows an answer in the demonstrations.

        Raises:
            ValueError: an option without tokens, or two options with the same tokens.
        """
        last = self.question.rpartition("\n")[2]
        ids = [following(lm.tokenizer, f" {option}", before=last) for option in self.options]
        seen: dict[tuple[int, ...], str] = {}
        for option, tokens in zip(self.options, ids, strict=True):
            if not option.strip() or not len(tokens):
                raise ValueError(
                    f"option {option!r} of {self.set} has no token under the tokenizer of {lm.name}: rename it in "
                    "the data"
                )
            if (other := seen.setdefault(tuple(tokens), option)) != option:
                raise ValueError(
                    f"options {other!r} and {option!r} of {self.set} are the same tokens for {lm.name}: rename one of "
                    "them in the data"
                )
        if any(tuple(tokens[:count]) in seen for tokens in ids for count in range(1, len(tokens))):
            end = following(lm.tokenizer, f"\n\n{self.question}", before="x")[:1]
            ids = [np.concatenate([tokens, end]) for tokens in ids]
        return ids

    def work(self, lm: LM, example: Example[IclPrompt]) -> Iterator[Work]:
        for length in example.lengths:
            _, passages, _ = example.payload.parts(self.head, length)
            tokens = self._prompt_tokens(lm, example, length)
            yield from _scoring(tokens, example.payload.options, tuple(map(len, passages)))

    def work_of_batch(self, lm: LM, example: Example[IclPrompt]) -> Iterator[Work]:
        return _scoring(len(lm.separator.ids), example.payload.options, ())

    def run(self, reader: Reader, batch: Sequence[Example[IclPrompt]]) -> Iterator[Result]:
        """Yield results of examples one by one, since their prompts differ in length."""
        lm, options = reader.lm, batch[0].payload.options
        separator = torch.tensor([lm.separator.ids])
        prior = nats_of_options(reader.read(head=separator), options)
        for length in batch[0].lengths:
            for example in batch:
                front, passages, query = example.payload.parts(self.head, length)
                memory = reader.read(*map(row, passages), head=torch.cat([separator, row(front)], 1))
                memory.read(row(query))
                nats = nats_of_options(memory, options)
                if not (np.isfinite(nats).all() and np.isfinite(prior).all()):
                    yield Result.of(example, length, memory, {}, "an option has no finite log-probability")
                    continue
                values = self._judged(nats, prior, [len(ids) for ids in options], example.payload.gold)
                values["demonstrations"] = {"head": min(length, self.head), "passages": len(passages)}
                values |= {"context": self._prompt_tokens(lm, example, length), **places(memory)}
                yield Result.of(example, length, memory, values)

    def parts(self, lm: LM, example: Example[IclPrompt], length: int) -> Parts:
        front, passages, query = example.payload.parts(self.head, length)
        right = example.payload.options[example.payload.gold]
        read = [("read", ids) for ids in (front, *passages)]
        return [*read, ("asked", np.concatenate([query, right]))], len(right)

    def _judged(self, nats: np.ndarray, prior: np.ndarray, tokens: list[int], gold: int) -> dict[str, Any]:
        nats, prior = nats.round(DIGITS), prior.round(DIGITS)
        predicted = predictions(nats, prior, tokens)
        return {
            "accuracy": float(predicted[self.scoring] == gold),
            **{f"accuracy_{scoring}": float(index == gold) for scoring, index in predicted.items()},
            "predicted": predicted[self.scoring],
            "gold": gold,
            "nats": nats.tolist(),
            "prior": prior.tolist(),
            "tokens": tokens,
        }


def _scoring(tokens: int, options: Sequence[np.ndarray], passages: tuple[int, ...]) -> Iterator[Work]:
    """Yield the work of reading a context of this many tokens, with passages, and scoring all options after it."""
    yield Work(1, 0, tokens, 0, passages)
    yield from (Work(1, tokens, len(ids) - 1, len(ids)) for ids in options)


def nats_of_options(memory: Memory, options: Sequence[np.ndarray]) -> np.ndarray:
    """Return -log p of each option after a memory of one row: options of one length are scored together."""
    nats = np.empty(len(options))
    for indices in by_key((len(ids), index) for index, ids in enumerate(options)).values():
        rows = torch.from_numpy(np.stack([options[index] for index in indices]))
        nats[indices] = memory.score(rows).nats.double().sum(1).cpu().numpy()
    return nats


def predictions(nats: ArrayLike, prior: ArrayLike, tokens: ArrayLike) -> dict[str, int]:
    """Return the option that each scoring chooses; for ties, the first."""
    plain, without, count = (np.asarray(values, dtype=np.float64) for values in (nats, prior, tokens))
    costs = (plain, plain / count, plain - without, (plain - without) / count)
    return {scoring: int(cost.argmin()) for scoring, cost in zip(SCORINGS, costs, strict=True)}
