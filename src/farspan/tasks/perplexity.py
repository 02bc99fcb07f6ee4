"""Perplexity by length: how well a model predicts the tokens of a text after more and more of it.

    nats = mean of -log p(token | separator, context)      perplexity = exp(nats)

Three choices of the targets at a total length of T tokens, in a window x of W tokens sampled for each repeat:

`fixed`  ours: the last n tokens of x at every length, after the T - n tokens before them. The context grows to the
         left and the targets stay the same, so lengths differ only in the tokens read.
`last`   the last n of the first T tokens of x, whose context always begins where x does: "the perplexity of the last
         256 tokens" of Yen et al. 2024 (CEPE), arXiv 2402.16617, section 4.1. Each length scores different tokens. One
         reading serves all lengths.
`all`    the first T tokens of x, all scored in one pass, as in SMT and most reports. Most of them have a shorter
         context than T; sums by position show the difference.

Logits are computed one block at a time. The separator precedes the text and is not counted in T.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.lengths import doubled_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM
from farspan.reader import CHUNK, Memory, Reader, Scores
from farspan.specs import choice, limited
from farspan.tasks.base import BoundText, Example, Parts, Quality, Result, Task, Work, digest, not_finite
from farspan.terminal import report

TARGETS = ("fixed", "last", "all")
TARGET_TOKENS = 256  # CEPE's
SHORTEST = 512  # tokens; the shortest default length, or a quarter of the trained length if that is less
FIRST_BUCKET = 64  # positions; each further bucket ends at twice the position of the one before
MASK = 1 << 22  # values of an attention mask [chunk, tokens read], at most, on a CPU
SMALLEST_CHUNK = 256  # tokens; smaller ones take longer


@dataclass(frozen=True)
class Perplexity(Task):
    """Nats per token and next-token accuracy on windows of the text."""

    targets: str = choice(TARGETS, "fixed")
    target_tokens: int | None = limited(None, 1)  # default: 256, or half of the shortest length if that is less
    # with targets=all: equal parts of each length; None: ends at 64, 128, 256, ...
    buckets: int | None = limited(None, 1)

    name: ClassVar[str] = "perplexity"
    details: ClassVar[tuple[str, ...]] = ("accuracy",)
    quality: ClassVar[Quality] = Quality("nats", "perplexity", higher_is_better=False, exp=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets == "all" and self.target_tokens not in (None, TARGET_TOKENS):
            raise ValueError(
                f"target_tokens={self.target_tokens} belongs to targets=fixed or last; targets=all scores every token: "
                "leave out one of the two"
            )
        if self.targets == "all":
            object.__setattr__(self, "target_tokens", TARGET_TOKENS)  # has no meaning; all runs record this name
        if self.buckets is not None and self.targets != "all":
            raise ValueError(f"buckets belong to targets=all, not to targets={self.targets}: leave them out")

    def resolved(self, lengths: Sequence[int] | None, trained: Sequence[int]) -> "Perplexity":
        if self.target_tokens is not None:
            return self
        shortest = lengths[0] if lengths else shortest_length(min(trained))
        return replace(self, target_tokens=max(1, min(TARGET_TOKENS, shortest // 2)))

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if the targets leave no context in the shortest length."""
        if self.targets != "all" and (count := self._num_targets) >= lengths[0]:
            raise ValueError(
                f"{count:,} target tokens leave no context in lengths up to {count:,} tokens: give fewer "
                "(perplexity:target_tokens=N; farspan perplexity: --target-tokens N), or longer lengths (--lengths)"
            )

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return powers of two to twice the largest trained length, from a quarter of the smallest, at most 512, or
        from the first with as many context tokens as targets."""
        first = shortest_length(min(trained))
        while self.targets != "all" and first < 2 * self._num_targets:
            first *= 2
        return doubled_lengths(first, trained)

    @property
    def _num_targets(self) -> int:
        return TARGET_TOKENS if self.target_tokens is None else self.target_tokens

    def on(self, lm: LM, text: str) -> "BoundPerplexity":
        self.refuse_open(target_tokens=self.target_tokens)
        return BoundPerplexity.of(self, lm, text)


@dataclass(frozen=True)
class Reading:
    """The scores of a batch at one length."""

    length: int
    scores: Scores  # of the targets, [examples, targets]
    num_seen: int
    num_kept: int
    broken: str  # the module whose output was the first that is not finite, at this or a shorter length; "": none


@dataclass(frozen=True, kw_only=True)
class BoundPerplexity(Perplexity, BoundText[np.ndarray]):
    """Perplexity of one text. An example's payload is a window, [tokens of the largest length]."""

    task: ClassVar[str] = "perplexity"
    version: ClassVar[int] = 2

    @property
    def settings(self) -> dict[str, Any]:
        what = {"buckets": self.buckets} if self.targets == "all" else {"target_tokens": self._num_targets}
        return {"targets": self.targets, **what, **self.text.named}

    def span(self, window: int, length: int) -> tuple[int, int, int]:
        """Return the beginning of the context, that of the targets, and the end of both, in a window of tokens."""
        if self.targets == "fixed":
            return window - length, window - self._num_targets, window
        return 0, 0 if self.targets == "all" else length - self._num_targets, length

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[np.ndarray]]:
        """Return a window of the largest length for each repeat, from as many documents as possible.

        Raises:
            ValueError: as many target tokens as a whole length, or a text too short.
        """
        self.check(lengths)
        what = f"{self.task} {self.version} {self.targets} {self.settings.get('target_tokens')} {lm.separator.ids}"
        return [
            Example(digest(f"{what} {seed} {repeat}", tokens), repeat, tuple(lengths), tokens)
            for repeat, tokens in enumerate(self.text.windows(lengths[-1], repeats, seed))
        ]

    def work(self, lm: LM, example: Example[np.ndarray]) -> Iterator[Work]:
        separator, window = len(lm.separator.ids), len(example.payload)
        read = 0
        for length in example.cuts if self.targets == "last" else example.lengths:
            begin, first, end = self.span(window, length)
            done = read if self.targets == "last" else 0
            before = separator + first - begin
            yield Work(1, done, before - done, 0)
            if length in example.lengths:
                yield Work(1, before, end - first - 1, end - first)
            read = before

    def readings(self, reader: Reader, batch: Sequence[Example[np.ndarray]]) -> Iterator["Reading"]:
        """Yield the scores of a batch at each of its lengths, shortest first.

        Raises:
            ValueError: targets=all under a method that changes only how the text before the targets is read.
        """
        self._check(reader)
        text = torch.from_numpy(np.stack([example.payload for example in batch])).long()
        head = torch.tensor([reader.lm.separator.ids]).expand(len(batch), -1)
        # a reader that cuts or mixes its text needs the whole text in one call; an incremental one continues
        goes_on = self.targets == "last" and reader.incremental
        memory: Memory | None = None
        read, layer = 0, ""
        for length in batch[0].cuts if goes_on else batch[0].lengths:
            begin, first, end = self.span(text.shape[1], length)
            if memory is not None and goes_on:
                memory.read(text[:, read:first])
            else:
                memory = None  # freed before the next one is read
                memory = reader.read(text[:, begin:first], head=head)
            read = first
            if length not in batch[0].lengths:
                continue
            scores = memory.score(text[:, first:end])
            counts = memory.num_seen, memory.num_kept
            if not layer and not bool(scores.nats.isfinite().all()):
                memory, read = None, 0
                layer = self._not_finite(reader, head, text, length)
            yield Reading(length, scores, *counts, layer)

    def around(self, reader: Reader) -> AbstractContextManager[None]:
        self._check(reader)
        return nullcontext()

    def _check(self, reader: Reader) -> None:
        if self.targets == "all" and reader.changes_only_before:
            raise ValueError(
                "targets=all scores a text from its first token on. This method changes only how the text before the "
                "targets is read or kept, so it would be full attention: use targets=fixed or targets=last"
            )

    def run(self, reader: Reader, batch: Sequence[Example[np.ndarray]]) -> Iterator[Result]:
        """Yield results of a batch, shortest length first."""
        for reading in self.readings(reader, batch):
            _, first, end = self.span(len(batch[0].payload), reading.length)
            for index, example in enumerate(batch):
                values, failed = self._judged(reading.scores, index)
                values["context"] = len(reader.lm.separator.ids) + reading.length
                values["target"] = digest(example.payload[first:end])
                how = ("nan", f"{not_finite(failed)}; {reading.broken}") if failed else ("ok", "")
                yield Result(example, reading.length, 0.0, values, *how, reading.num_seen, reading.num_kept)

    def _judged(self, scores: Scores, index: int) -> tuple[dict[str, Any], int]:
        """Return the scores of one example at one length as a row holds them, and how many of its tokens have no finite
        log-probability. If any, the row has neither nats nor accuracy, so that both are means over the same rows."""
        nats = scores.nats[index].cpu().double().numpy()
        if failed := int((~np.isfinite(nats)).sum()):
            return {"nats": None, "scored": len(nats)}, failed
        hits = (scores.rank[index] == 0).cpu().numpy()
        values: dict[str, Any] = {
            "nats": float(nats.mean()),
            "accuracy": float(hits.mean()),
            "scored": len(nats),
            "hits": np.packbits(hits).tobytes().hex(),
        }
        if self.targets == "all":
            ends = bucket_ends(len(nats), self.buckets)
            values["buckets"] = {
                "ends": ends,
                "nats": [float(part.sum()) for part in np.split(nats, ends[:-1])],
                "hits": [int(part.sum()) for part in np.split(hits, ends[:-1])],
            }
        return values, 0

    def _not_finite(self, reader: Reader, head: torch.Tensor, text: torch.Tensor, length: int) -> str:
        """Read and score again, and return a reason that names the first module whose output is not finite."""
        begin, first, end = self.span(text.shape[1], length)
        with reader.lm.first_not_finite() as found:
            reader.read(text[:, begin:first], head=head).score(text[:, first:end])
        where = found() or "the output head"
        return f"at {length:,} tokens the first numbers that are not finite came out of {where}"

    def parts(self, lm: LM, example: Example[np.ndarray], length: int) -> Parts:
        begin, first, end = self.span(len(example.payload), length)
        read, asked = ("read", example.payload[begin:first]), ("asked", example.payload[first:end])
        return [("separator", lm.separator.ids), read, asked], end - first

    def auto_lengths(self, lm: LM, repeats: int, *, quiet: bool = False) -> tuple[int, ...]:
        """Return the lengths of `lengths` for this model that its positions and the text allow.

        Raises:
            ValueError: more target tokens than its positions allow.
        """
        trained = lm.trained_length or DEFAULT_TRAINED_LENGTH
        longest = 2 * trained
        if lm.position_limit is not None:
            longest = min(longest, lm.position_limit - len(lm.separator.ids) + 1)
        lengths = [length for length in self.lengths((trained,)) if length <= longest]
        if not lengths:
            self.check((longest,))
            return (longest,)
        fitting = [length for length in lengths if self.text.num_windows(length, repeats) >= repeats]
        if fitting and fitting != lengths and not quiet:
            report(f"the text is too short for {lengths[-1]:,} tokens: the longest length is {fitting[-1]:,}")
        return tuple(fitting or lengths[:1])

    def chunk(self, lm: LM, longest: int) -> int | None:
        """Return a smaller chunk than the reader's own, in tokens, if the attention mask would have more than MASK
        values on a CPU; else None."""
        if lm.device.type != "cpu" or CHUNK * longest <= MASK:
            return None
        return max(SMALLEST_CHUNK, MASK // longest)


def shortest_length(trained: int) -> int:
    """Return the largest power of two that is no more than a quarter of the trained length, at most SHORTEST."""
    return min(SHORTEST, 1 << (max(1, trained // 4).bit_length() - 1))


def bucket_ends(length: int, buckets: int | None) -> list[int]:
    """Return the ends of the buckets of positions: FIRST_BUCKET and its doublings up to the length, or `buckets` parts
    of equal size."""
    if buckets is not None:
        return sorted({length * i // buckets for i in range(1, buckets + 1)} - {0})
    ends = [FIRST_BUCKET]
    while ends[-1] < length:
        ends.append(2 * ends[-1])
    return [*ends[:-1], length]
