"""A document, an instruction behind it, an answer in words: what the sets of long-document understanding share.

A length is all there is room for, in tokens: separator, prompt and answer. Where a document is too long for that, the
example is counted and not asked ("too_long"), unless it was said which part of the document to leave out. What was
left out stands in every row.

The document is read as one passage behind the separator: how it is cut is the business of the method. The rest of the
prompt is read behind it, and answered from there.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.lm import LM
from farspan.reader import NotFiniteError, Reader
from farspan.tasks.base import Example, Result, Work
from farspan.tasks.passages import places
from farspan.tasks.prompts import behind, pieces, stops, token_texts

TRUNCATE = ("none", "beginning", "middle", "end")  # what of a document is left out


@dataclass(frozen=True)
class Item:
    """One document with what is asked of it."""

    name: str
    before: str  # the prompt in front of the document
    document: str
    after: str  # the prompt behind it
    references: tuple[str, ...]
    options: tuple[str, ...] = ()  # of a choice, or the classes


@dataclass(frozen=True)
class Answering:
    """How an answer is generated; greedy at temperature 0."""

    new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    one_line: bool = False  # the answer ends with its first line


@dataclass(frozen=True)
class DocumentTask:
    """Answers to questions about documents."""

    set: str
    items: tuple[Item, ...] = field(repr=False)
    answering: Answering
    truncate: str = "none"  # one of TRUNCATE
    omitted: str = ""  # stands where the end of a document was left out

    name: ClassVar[str]
    version: ClassVar[int]

    def __post_init__(self) -> None:
        check_truncate(self.truncate)
        check_new_tokens(self.answering.new_tokens)

    def judged(self, prediction: str, item: Item) -> dict[str, float]:
        """The scores of an answer, "score" among them."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        return {"set": self.set, "truncate": self.truncate, **vars(self.answering), "data_hash": self._hash}

    @cached_property
    def _hash(self) -> str:
        return _digest([[i.before, i.document, i.after, i.references, i.options] for i in self.items])

    def num_tokens(self, lm: LM, length: int) -> int:
        return length

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example]:
        """`repeats` items, drawn.

        Raises:
            ValueError: fewer items than that.
        """
        if repeats > len(self.items):
            raise ValueError(f"{self.set} has {len(self.items):,} examples; {repeats:,} were asked for (--repeats)")
        chosen = np.random.default_rng([seed]).permutation(len(self.items))[:repeats]
        examples = []
        for repeat, index in enumerate(chosen):
            item = self.items[index]
            before, document, after = pieces(lm.tokenizer, item.before, item.document, item.after)
            what = [self.name, self.version, self.settings, seed, item.name, item.references, item.options]
            prompt = [ids.tolist() for ids in (before, document, after)]
            tokens = {"before": before, "document": document, "after": after, "item": np.array([index])}
            examples.append(Example(_digest([*what, lm.separator.ids, prompt]), repeat, tuple(lengths), tokens))
        return examples

    def kept(self, lm: LM, example: Example, length: int) -> tuple[np.ndarray, int] | None:
        """The tokens of the document that fit, with what says that its end is missing, and how many were left out;
        None where it must not be cut or nothing of it would be left."""
        document = example.tokens["document"]
        fixed = len(lm.separator.ids) + len(example.tokens["before"]) + len(example.tokens["after"])
        room = length - fixed - self.answering.new_tokens
        if len(document) <= room:
            return document, 0
        note = behind(lm.tokenizer, self.omitted, before="x") if self.truncate == "end" else document[:0]
        room -= len(note)
        if self.truncate == "none" or room < 1:
            return None
        first = {"beginning": 0, "middle": room // 2, "end": room}[self.truncate]
        last = len(document) - (room - first)
        return np.concatenate([document[:first], note, document[last:]]), len(document) - room

    def work(self, lm: LM, example: Example) -> Iterator[Work]:
        for length in example.lengths:
            if (found := self.kept(lm, example, length)) is not None:
                rest = len(example.tokens["before"]) + len(example.tokens["after"])
                prompt = len(lm.separator.ids) + rest + len(found[0])
                yield Work(1, 0, prompt, 0)
                yield from (Work(1, prompt + i, 1, 1) for i in range(self.answering.new_tokens))

    def run(self, reader: Reader, batch: Sequence[Example]) -> Iterator[Result]:
        """Results of a batch of examples that share lengths; each is read by itself, being of its own length."""
        stop = stops(reader.lm.tokenizer, one_line=self.answering.one_line)
        for length in batch[0].lengths:
            for example in batch:
                yield self._answered(reader, example, length, stop)

    def _answered(self, reader: Reader, example: Example, length: int, stop: Sequence[int]) -> Result:
        lm, how, item = reader.lm, self.answering, self.items[int(example.tokens["item"][0])]
        if not any(reference.strip() for reference in item.references):
            return Result(example, length, status="no_reference", reason=f"{item.name} has no reference answer")
        if (found := self.kept(lm, example, length)) is None:
            return Result(example, length, status="too_long", reason=self._too_long(lm, example, length))
        document, left_out = found
        passage = torch.from_numpy(np.concatenate([example.tokens["before"], document]))[None]
        memory = reader.read(passage, head=torch.tensor([lm.separator.ids]))
        memory.read(torch.from_numpy(example.tokens["after"])[None])
        try:
            [new] = memory.generate(
                torch.empty(1, 0, dtype=torch.long),
                how.new_tokens,
                stop=stop,
                seed=int(example.id, 16) % 2**63,
                min_new_tokens=how.min_new_tokens,
                temperature=how.temperature,
                top_p=how.top_p,
            )
        except NotFiniteError as error:
            return Result(example, length, status="nan", reason=str(error), num_seen=memory.num_seen)
        prediction = lm.tokenizer.decode(new.tolist(), skip_special_tokens=True)
        if how.one_line:
            prediction = prediction.split("\n")[0]
        values = {
            **self.judged(prediction, item),
            "item": item.name,
            "prediction": prediction,
            "references": list(item.references),
            "document": len(example.tokens["document"]),
            "left_out": left_out,
            "new": len(new),
            "context": len(lm.separator.ids) + passage.shape[1] + len(example.tokens["after"]),
            **places(memory),
        }
        return Result(example, length, scores=values, num_seen=memory.num_seen, num_kept=memory.num_kept)

    def shown(self, lm: LM, example: Example, length: int) -> dict[str, Any]:
        """An example in words, with what fits of its document (all of it where it must not be cut), its parts token by
        token; the last `scored` are an answer that would be right."""
        tokens, item = example.tokens, self.items[int(example.tokens["item"][0])]
        document, _ = self.kept(lm, example, length) or (tokens["document"], 0)
        right = behind(lm.tokenizer, f" {item.references[0]}", before="x")
        parts = [["read", token_texts(lm.tokenizer, ids)] for ids in (tokens["before"], document) if len(ids)]
        parts.append(["asked", token_texts(lm.tokenizer, np.concatenate([tokens["after"], right]))])
        return {"length": length, "repeat": example.repeat, "parts": parts, "scored": len(right)}

    def _too_long(self, lm: LM, example: Example, length: int) -> str:
        rest = len(lm.separator.ids) + len(example.tokens["before"]) + len(example.tokens["after"])
        room, document = self.answering.new_tokens, len(example.tokens["document"])
        need = f"the document has {document:,} tokens, the rest of the prompt {rest:,}, the answer {room:,}"
        if self.truncate == "none":
            return f"{need}: more than {length:,}; leave out a part of it (truncate=beginning, middle or end)"
        return f"{need}: nothing of the document fits into {length:,}"


def check_new_tokens(new_tokens: int) -> None:
    """Raise ValueError unless an answer may have a token."""
    if new_tokens < 1:
        raise ValueError(f"new_tokens = {new_tokens}; at least 1 is needed")


def check_truncate(truncate: str) -> None:
    """Raises ValueError unless it is among TRUNCATE."""
    if truncate not in TRUNCATE:
        raise ValueError(
            f"truncate = {truncate!r} is unknown, expected the part of a long document to leave out: "
            + ", ".join(TRUNCATE)
        )


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
