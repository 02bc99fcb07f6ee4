"""Passkey retrieval: a number hidden at a depth of a long, monotonous text, and queried at the end.

    {description}{filler}The pass key is 71432. Remember it. 71432 is the pass key.{filler}{question} The pass key is

Mohtashami and Jaggi 2023 (Landmark Attention), arXiv 2305.16300, section 4.2 and appendix: their wording, a number of
five digits, a filler of five short sentences repeated to the length. Right if every token of the number has the highest
probability given the ones before it, as in greedy decoding. A length is all tokens of the prompt; the separator is not
counted. The last repetition is cut to the length and ends its line, as in the authors' script. The depth is the share
of the filler before the number, rounded to whole repetitions. An example has the same number at all lengths and depths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.lengths import doubled_lengths
from farspan.lm import LM
from farspan.reader import Reader
from farspan.specs import limited
from farspan.tasks.base import Bound, Example, Parts, Quality, Result, Task, Work, digest, not_finite
from farspan.tasks.passages import places, row
from farspan.text.prompts import continued, encoded

DESCRIPTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
KEY = "The pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "What is the pass key? The pass key is"
MOST_DIGITS = 15


@dataclass(frozen=True)
class PasskeyPrompt:
    """The parts of a prompt as tokens."""

    description: np.ndarray
    filler: np.ndarray  # one repetition
    key: np.ndarray  # the sentences with the number
    question: np.ndarray
    answer: np.ndarray

    @property
    def fixed(self) -> int:
        """The number of tokens of a prompt without its filler."""
        return len(self.description) + len(self.key) + len(self.question)

    def context(self, length: int, depth: float) -> np.ndarray:
        """Return the tokens before the question, in a prompt of `length` tokens."""
        count, rest = divmod(length - self.fixed, len(self.filler))
        before = round(depth * count)
        parts = [self.description, *[self.filler] * before, self.key, *[self.filler] * (count - before)]
        cut = [self.filler[: rest - 1], self.filler[-1:]] if rest else []  # its last token ends the line
        return np.concatenate([*parts, *cut])


@dataclass(frozen=True)
class Passkey(Task):
    """A number hidden in a monotonous text."""

    depths: int = limited(5, 1, 1000)  # evenly spaced from the beginning of the text to its end; 1: in the middle
    digits: int = limited(5, 1, MOST_DIGITS)  # of the number

    name: ClassVar[str] = "passkey"
    reads_text: ClassVar[bool] = False
    quality: ClassVar[Quality] = Quality("right", "right answers", higher_is_better=True)
    details: ClassVar[tuple[str, ...]] = ("digits",)
    same_at_depths: ClassVar[bool] = True

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return a quarter of the smallest trained length, but at least 256, and its doublings to twice the largest."""
        return doubled_lengths(max(256, min(trained) // 4), trained)

    def on(self, lm: LM, text: str) -> "BoundPasskey":
        return BoundPasskey(**vars(self))


@dataclass(frozen=True)
class BoundPasskey(Passkey, Bound[PasskeyPrompt]):
    """The task itself; it needs no text."""

    task: ClassVar[str] = "passkey"
    needs_nats: ClassVar[bool] = False
    reads_together: ClassVar[bool] = False
    version: ClassVar[int] = 3

    @property
    def settings(self) -> dict[str, Any]:
        return {"depths": self.depths, "digits": self.digits}

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[PasskeyPrompt]]:
        """Return a prompt with another number for each repeat.

        Raises:
            ValueError: a length too short for the number and its question.
        """
        return [self._example(lm, tuple(lengths), repeat, seed) for repeat in range(repeats)]

    def _example(self, lm: LM, lengths: tuple[int, ...], repeat: int, seed: int) -> Example[PasskeyPrompt]:
        lowest = 10 ** (self.digits - 1)
        key = int(np.random.default_rng([seed, repeat]).integers(lowest, 10 * lowest))
        question, answer = continued(lm.tokenizer, QUESTION, f" {key}")
        [filler], [hidden] = (continued(lm.tokenizer, text) for text in (FILLER, KEY.format(key=key)))
        prompt = PasskeyPrompt(encoded(lm.tokenizer, DESCRIPTION), filler, hidden, question, answer)
        if lengths[0] < prompt.fixed:
            raise ValueError(
                f"a length of {lengths[0]} tokens is too short: the prompt has {prompt.fixed} without its filler; give "
                f"lengths from {prompt.fixed} on (--lengths)"
            )
        what = f"{self.task} {self.version} {self.depths} {lm.separator.ids} {seed} {repeat}"
        depths = tuple(np.linspace(0, 1, self.depths).round(6).tolist()) if self.depths > 1 else (0.5,)
        return Example(digest(what, *vars(prompt).values()), repeat, lengths, prompt, depths)

    def work(self, lm: LM, example: Example[PasskeyPrompt]) -> Iterator[Work]:
        prompt = example.payload
        last = len(prompt.question) + len(prompt.answer)
        for length in example.lengths:
            before = len(lm.separator.ids) + length - len(prompt.question)
            for _ in example.depths:
                yield Work(1, 0, before, 0)
                yield Work(1, before, last - 1, len(prompt.answer))

    def run(self, reader: Reader, batch: Sequence[Example[PasskeyPrompt]]) -> Iterator[Result]:
        """Yield results of examples one by one, shortest length and smallest depth first."""
        head = torch.tensor([reader.lm.separator.ids])
        for length in batch[0].lengths:
            for depth in batch[0].depths:
                for example in batch:
                    prompt = example.payload
                    memory = reader.read(row(prompt.context(length, depth)), head=head)
                    last = row(np.concatenate([prompt.question, prompt.answer]))
                    scores = memory.score(last, slice(len(prompt.question), None))
                    hits, nats = (scores.rank[0] == 0).cpu().numpy(), float(scores.nats[0].double().sum())
                    reason = not_finite(int(scores.failed.sum()))
                    values = {} if reason else {"right": float(hits.all()), "digits": float(hits.mean())}
                    values |= {"nats": nats} if np.isfinite(nats) else {}  # some servers return only hits
                    values |= {"context": head.shape[1] + length, **places(memory)}
                    yield Result.of(example, length, memory, values, reason, depth)

    def parts(self, lm: LM, example: Example[PasskeyPrompt], length: int) -> Parts:
        """Return the parts at the first depth."""
        prompt = example.payload
        read = "read", prompt.context(length, example.depths[0])
        last = "asked", np.concatenate([prompt.question, prompt.answer])
        return [("separator", lm.separator.ids), read, last], len(prompt.answer)
