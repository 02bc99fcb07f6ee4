"""A document, then an instruction, answered with text: shared by the sets of long-document understanding.

A length is the largest number of tokens of separator, prompt and answer. An example whose document is too long is
recorded and not measured ("too_long"), unless `truncate` names the part of the document to leave out. Every row records
how many tokens were left out.

After the separator the document is read as one passage, which the method may cut. The rest of the prompt is read next,
and then the answer is generated.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.lm import LM
from farspan.reader import Memory, NotFiniteError, Reader
from farspan.tasks.base import Bound, Example, Parts, Result, Task, Work, digest, distinct, stops
from farspan.tasks.passages import places, row
from farspan.text.prompts import following, pieces

TRUNCATE = ("none", "beginning", "middle", "end")  # the part of a document to leave out


@dataclass(frozen=True)
class Item:
    """One document with its prompt and references."""

    name: str
    before: str  # the prompt before the document
    document: str
    after: str  # the prompt after it
    references: tuple[str, ...]
    options: tuple[str, ...] = ()  # answers to choose from, or the classes
    about: tuple[tuple[str, str], ...] = ()  # further fields of its rows


@dataclass(frozen=True)
class Answering:
    """How an answer is generated; greedy at temperature 0."""

    new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    one_line: bool = False  # the answer ends with its first line


class DocumentTask(Task):
    """The base of tasks on documents of their own."""

    reads_text: ClassVar[bool] = False

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return the trained lengths, each for prompt and answer together."""
        return tuple(sorted(set(trained)))


@dataclass(frozen=True)
class DocumentPrompt:
    """One item as tokens."""

    before: np.ndarray
    document: np.ndarray
    after: np.ndarray
    item: Item


@dataclass(frozen=True)
class BoundDocuments(Bound[DocumentPrompt]):
    """Answers to questions about the documents of one set."""

    needs_nats: ClassVar[bool] = False  # answers are generated
    reads_together: ClassVar[bool] = False

    set: str
    items: tuple[Item, ...] = field(repr=False)
    answering: Answering
    truncate: str = "none"  # one of TRUNCATE
    omitted: str = ""  # replaces the end of a document that was left out

    def judged(self, prediction: str, item: Item) -> dict[str, float]:
        """Return the scores of an answer, including "score"."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        return {"set": self.set, "truncate": self.truncate, **vars(self.answering), "data_hash": self._hash}

    @cached_property
    def _hash(self) -> str:
        return digest(json.dumps([[i.before, i.document, i.after, i.references, i.options] for i in self.items]))

    def num_tokens(self, lm: LM, example: Example[DocumentPrompt], length: int) -> int:
        return length

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[DocumentPrompt]]:
        """Return `repeats` items, sampled.

        Raises:
            ValueError: fewer items than that.
        """
        if repeats > len(self.items):
            raise ValueError(f"{self.set} has {len(self.items):,} examples; {repeats:,} are needed (--repeats)")
        chosen = np.random.default_rng([seed]).permutation(len(self.items))[:repeats]
        examples = []
        for repeat, index in enumerate(chosen.tolist()):
            given = self._prompt(lm, index)
            item = given.item
            what = [self.task, self.version, self.settings, seed, item.name, item.references, item.options]
            prompt = [ids.tolist() for ids in (given.before, given.document, given.after)]
            name = digest(json.dumps([*what, lm.separator.ids, prompt]))
            examples.append(Example(name, repeat, tuple(lengths), given))
        return distinct(examples)

    @cached_property
    def _prompts(self) -> dict[tuple[Any, int], DocumentPrompt]:
        """The prompts by tokenizer and item, kept because long documents take seconds and every method needs them."""
        return {}

    def _prompt(self, lm: LM, index: int) -> DocumentPrompt:
        if (key := (lm.tokenizer, index)) not in self._prompts:
            item = self.items[index]
            before, document, after = pieces(lm.tokenizer, item.before, item.document, item.after)
            self._prompts[key] = DocumentPrompt(before, document, after, item)
        return self._prompts[key]

    def kept(self, lm: LM, example: Example[DocumentPrompt], length: int) -> tuple[np.ndarray, int] | None:
        """Return the tokens of the document that fit, with the note that its end is missing, and how many were left
        out; None if it must not be cut or none would fit."""
        document = example.payload.document
        fixed = self._fixed(lm, example)
        available = length - fixed - self.answering.new_tokens
        if len(document) <= available:
            return document, 0
        note = following(lm.tokenizer, self.omitted, before="x") if self.truncate == "end" else document[:0]
        available -= len(note)
        if self.truncate == "none" or available < 1:
            return None
        first = {"beginning": 0, "middle": available // 2, "end": available}[self.truncate]
        last = len(document) - (available - first)
        return np.concatenate([document[:first], note, document[last:]]), len(document) - available

    def work(self, lm: LM, example: Example[DocumentPrompt]) -> Iterator[Work]:
        for length in example.lengths:
            if (found := self.kept(lm, example, length)) is not None:
                prompt = self._fixed(lm, example) + len(found[0])
                yield Work(1, 0, prompt, 0, (len(example.payload.before) + len(found[0]),))
                yield from self.answer_work(prompt)

    def ends(self, lm: LM) -> list[int] | None:
        return lm.stop_tokens

    def answer_work(self, prompt: int) -> Iterator[Work]:
        """Yield the work of an answer after a prompt of this many tokens."""
        yield Work(1, prompt, 0, 1)
        yield from (Work(1, prompt + i, 1, 1) for i in range(self.answering.new_tokens - 1))

    def run(self, reader: Reader, batch: Sequence[Example[DocumentPrompt]]) -> Iterator[Result]:
        """Yield results of examples one by one, since their prompts differ in length."""
        stop = stops(reader.lm, one_line=self.answering.one_line)
        for length in batch[0].lengths:
            for example in batch:
                yield self._answered(reader, example, length, stop)

    def _answered(self, reader: Reader, example: Example[DocumentPrompt], length: int, stop: Sequence[int]) -> Result:
        lm, given = reader.lm, example.payload
        item = given.item
        if not any(reference.strip() for reference in item.references):
            return Result(example, length, status="no_reference", reason=f"{item.name} has no reference answer")
        if (found := self.kept(lm, example, length)) is None:
            return Result(example, length, status="too_long", reason=self._too_long(lm, example, length))
        document, left_out = found
        memory = reader.read(row(np.concatenate([given.before, document])), head=torch.tensor([lm.separator.ids]))
        memory.read(row(given.after))
        try:
            answer = self.answer(lm, memory, example, stop)
        except NotFiniteError as error:
            return Result(example, length, status="nan", reason=str(error), num_seen=memory.num_seen)
        values = {
            **answer,
            "item": item.name,
            **dict(item.about),
            "references": list(item.references),
            "document": len(given.document),
            "left_out": left_out,
            "context": self._fixed(lm, example) + len(document),
            **places(memory),
        }
        return Result.of(example, length, memory, values)

    def answer(self, lm: LM, memory: Memory, example: Example[DocumentPrompt], stop: Sequence[int]) -> dict[str, Any]:
        """Return the answer after a memory of the whole prompt, with its scores.

        Raises:
            NotFiniteError: numbers that determine no answer.
        """
        how = self.answering
        [new] = memory.generate(
            torch.empty(1, 0, dtype=torch.long),
            how.new_tokens,
            stop=stop,
            seed=int(example.id, 16) % 2**63,
            min_new_tokens=how.min_new_tokens,
            temperature=how.temperature,
            top_p=how.top_p,
        )
        prediction = lm.tokenizer.decode(new.tolist(), skip_special_tokens=True)
        if how.one_line:
            prediction = prediction.split("\n")[0]
        return {**self.judged(prediction, example.payload.item), "prediction": prediction, "new": len(new)}

    def parts(self, lm: LM, example: Example[DocumentPrompt], length: int) -> Parts:
        """Return the parts, with the part of the document that fits (all of it if it must not be cut)."""
        given = example.payload
        document, _ = self.kept(lm, example, length) or (given.document, 0)
        right = following(lm.tokenizer, self.right(given.item), before="x")
        read = [("read", given.before), ("read", document)]
        return [*read, ("asked", np.concatenate([given.after, right]))], len(right)

    def right(self, item: Item) -> str:
        """Return a right answer as it follows the prompt."""
        return f" {item.references[0]}"

    @staticmethod
    def _fixed(lm: LM, example: Example[DocumentPrompt]) -> int:
        """Return the tokens of the prompt without its document."""
        return len(lm.separator.ids) + len(example.payload.before) + len(example.payload.after)

    def _too_long(self, lm: LM, example: Example[DocumentPrompt], length: int) -> str:
        rest, answer, document = self._fixed(lm, example), self.answering.new_tokens, len(example.payload.document)
        need = f"the document has {document:,} tokens, the rest of the prompt {rest:,}, the answer {answer:,}"
        if self.truncate == "none":
            return f"{need}: more than {length:,}; leave out a part of it (truncate=beginning, middle or end)"
        return f"{need}: nothing of the document fits into {length:,}"
