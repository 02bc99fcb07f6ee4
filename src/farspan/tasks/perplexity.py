"""Perplexity by length: how well a model expects the tokens of a text, given how much of it.

    nats = mean of -log p(token | separator, context)      perplexity = exp(nats)

Three choices of what is scored at a total length of T tokens, of a text x of W tokens drawn for each repeat:

`fixed`  ours: the last n tokens of x at every length, behind the T - n tokens before them. The context grows to the
         left and the targets stay, so that lengths differ by what was read and by nothing else.
`last`   the tokens T - n to T of x, whose context always begins where x does: "the perplexity of the last 256 tokens"
         of Yen et al. 2024 (CEPE), arXiv 2402.16617, section 4.1. Other lengths score other tokens. One reading
         serves all lengths.
`all`    the first T tokens of x, all scored in one pass, as in SMT and most reports. Most of them have a shorter
         context than T; sums by position say how each did.

No logits of more than one block are ever held. The separator stands before the text and is not counted in T.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.lm import LM
from farspan.reader import DenseReader, Memory, Reader, Scores
from farspan.spelling import written
from farspan.tasks.base import Example, Quality, Result, Work
from farspan.text.corpora import Corpus, load

TARGETS = ("fixed", "last", "all")
TARGET_TOKENS = 256  # CEPE's
SHORTEST = 512  # tokens; a quarter of the trained length, where that is less
FIRST_BUCKET = 64  # positions; each further one ends at twice the position of the one before


@dataclass(frozen=True)
class Perplexity:
    """Nats per token and next-token accuracy on windows of one text."""

    text: Corpus
    targets: str = "fixed"  # one of TARGETS
    target_tokens: int = TARGET_TOKENS  # n; without meaning for `all`
    buckets: int | None = None  # equal parts of each length, for `all`; None: powers of two from FIRST_BUCKET

    name: ClassVar[str] = "perplexity"
    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_targets(self.targets)
        if self.target_tokens < 1:
            raise ValueError(f"target tokens = {self.target_tokens}; at least 1 is needed (--target-tokens)")
        if self.buckets is not None and self.buckets < 1:
            raise ValueError(f"buckets = {self.buckets}; at least 1 is needed")

    @property
    def settings(self) -> dict[str, Any]:
        what = {"buckets": self.buckets} if self.targets == "all" else {"target_tokens": self.target_tokens}
        return {"targets": self.targets, **what, "text": self.text.name, "text_hash": self.text.hash}

    def num_tokens(self, lm: LM, length: int) -> int:
        """Tokens fed: the last one is only asked for."""
        return len(lm.separator.ids) + length - 1

    def span(self, window: int, length: int) -> tuple[int, int, int]:
        """Where in a text of `window` tokens the context begins, the targets begin, and both end."""
        if self.targets == "fixed":
            return window - length, window - self.target_tokens, window
        return 0, 0 if self.targets == "all" else length - self.target_tokens, length

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example]:
        """A window of the largest length for each repeat, from as many documents as possible.

        Raises:
            ValueError: as many target tokens as a whole length, or a text too short.
        """
        window = lengths[-1]
        if self.targets != "all":
            check_target_tokens(self.target_tokens, lengths, f"{self.name}:target_tokens=N")
        if len(self.text.tokens) < repeats * window:
            raise ValueError(
                f"text {self.text.name!r} has {len(self.text.tokens):,} tokens; {repeats} repeats of {window:,} need "
                f"{repeats * window:,}: give a longer text, a smaller largest length or fewer repeats"
            )
        what = f"{self.name} {self.version} {self.targets} {self.settings.get('target_tokens')} {lm.separator.ids}"
        return [
            Example(_digest(f"{what} {seed} {repeat}", tokens), repeat, tuple(lengths), {"text": tokens})
            for repeat, tokens in enumerate(self.text.windows(window, repeats, seed))
        ]

    def work(self, lm: LM, example: Example) -> Iterator[Work]:
        separator, window = len(lm.separator.ids), len(example.tokens["text"])
        read = 0
        for length in example.cuts if self.targets == "last" else example.lengths:
            begin, first, end = self.span(window, length)
            done = read if self.targets == "last" else 0
            before = separator + first - begin
            yield Work(1, done, before - done, 0)
            if length in example.lengths:
                yield Work(1, before, end - first - 1, end - first)
            read = before

    def run(self, reader: Reader, batch: Sequence[Example]) -> Iterator[Result]:
        """Results of a batch of examples that share lengths, shortest length first."""
        text = torch.from_numpy(np.stack([example.tokens["text"] for example in batch])).long()
        head = torch.tensor([reader.lm.separator.ids]).expand(len(batch), -1)
        # what a reader cuts or mixes must come in one piece; one that joins can go on
        goes_on = self.targets == "last" and isinstance(reader, DenseReader)
        memory: Memory | None = None
        read, layer = 0, ""
        for length in batch[0].cuts if goes_on else batch[0].lengths:
            begin, first, end = self.span(text.shape[1], length)
            if memory is not None and goes_on:
                memory.read(text[:, read:first])
            else:
                memory = None  # gone before the next one is read
                memory = reader.read(text[:, begin:first], head=head)
            read = first
            if length not in batch[0].lengths:
                continue
            scores = memory.score(text[:, first:end])
            counts = memory.num_seen, memory.num_kept
            if not layer and not bool(scores.nats.isfinite().all()):
                memory, read = None, 0
                layer = self._not_finite(reader, head, text, length)
            for index, example in enumerate(batch):
                values, failed = self._judged(scores, index)
                values["context"] = head.shape[1] + length
                values["target"] = _digest("", example.tokens["text"][first:end])
                yield Result(
                    example,
                    length,
                    scores=values,
                    status="nan" if failed else "ok",
                    reason=f"{failed} scored tokens have no finite log-probability; {layer}" if failed else "",
                    num_seen=counts[0],
                    num_kept=counts[1],
                )

    def _judged(self, scores: Scores, index: int) -> tuple[dict[str, Any], int]:
        """Return the scores of one example at one length as a row holds them, and how many of its tokens have no finite
        log-probability. If any, the row has neither nats nor accuracy, so that no mean counts one without the other."""
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
            parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
            values["buckets"] = {
                "ends": ends,
                "nats": [float(nats[part].sum()) for part in parts],
                "hits": [int(hits[part].sum()) for part in parts],
            }
        return values, 0

    def _not_finite(self, reader: Reader, head: torch.Tensor, text: torch.Tensor, length: int) -> str:
        """Reads and asks again, and says where the first numbers that are not finite came from."""
        begin, first, end = self.span(text.shape[1], length)
        with first_not_finite(reader.lm.model) as found:
            reader.read(text[:, begin:first], head=head).score(text[:, first:end])
        where = found() or "the output head"
        return f"at {length:,} tokens the first numbers that are not finite came out of {where}"


@dataclass(frozen=True)
class PerplexityQuestion:
    """Perplexity of the text at chosen lengths."""

    targets: str = "fixed"  # one of TARGETS
    target_tokens: int = TARGET_TOKENS

    unit: ClassVar[str] = "tokens"
    quality: ClassVar[Quality] = Quality("nats", "perplexity", higher_is_better=False, exp=True)

    def __post_init__(self) -> None:
        check_targets(self.targets)
        if self.target_tokens < 1:
            raise ValueError(f"target_tokens = {self.target_tokens} is not possible: give at least 1")
        if self.targets == "all" and self.target_tokens != TARGET_TOKENS:
            raise ValueError(
                f"target_tokens={self.target_tokens} belongs to targets=fixed or last; targets=all scores every token: "
                "leave out one of the two"
            )

    def __str__(self) -> str:
        return written("perplexity", self)

    def on(self, lm: LM, text: str) -> Perplexity:
        return Perplexity(load(text, lm.tokenizer), self.targets, self.target_tokens)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Powers of two from a quarter of the smallest trained length, at most 512, or from what leaves the targets as
        much context, to twice the largest."""
        first = shortest_length(min(trained))
        while self.targets != "all" and first < 2 * self.target_tokens:
            first *= 2
        return tuple(first << i for i in range(max(1, (2 * max(trained) // first).bit_length())))


def shortest_length(trained: int) -> int:
    """The largest power of two that is no more than a quarter of the trained length, at most SHORTEST."""
    return min(SHORTEST, 1 << (max(1, trained // 4).bit_length() - 1))


def check_targets(targets: str) -> None:
    """Raises ValueError unless the targets are among TARGETS."""
    if targets not in TARGETS:
        raise ValueError(f"targets {targets!r} are unknown; known are {', '.join(TARGETS)}")


def check_target_tokens(target_tokens: int, lengths: Sequence[int], option: str) -> None:
    """Raise ValueError if the targets leave no context in the shortest length. `option`: what sets their number."""
    if target_tokens >= lengths[0]:
        raise ValueError(
            f"{target_tokens:,} target tokens leave no context in a length of {lengths[0]:,} tokens: give fewer "
            f"({option}), or lengths from {target_tokens + 1:,} on (--lengths)"
        )


def bucket_ends(length: int, buckets: int | None) -> list[int]:
    """Where the buckets of positions end: at powers of two, or so that there are as many equal ones."""
    if buckets is not None:
        return sorted({length * i // buckets for i in range(1, buckets + 1)} - {0})
    ends = [FIRST_BUCKET]
    while ends[-1] < length:
        ends.append(2 * ends[-1])
    return [*ends[:-1], length]


@contextmanager
def first_not_finite(model: torch.nn.Module) -> Iterator[Callable[[], str]]:
    """Within, watches what comes out of every module; gives a function that names the first one whose numbers are not
    finite, "" if none."""
    found: list[str] = []

    def watching(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def watch(module: torch.nn.Module, given: Any, result: Any) -> None:
            if not found and any(not bool(t.isfinite().all()) for t in _floats(result)):
                found.append(name)

        return watch

    hooks = [module.register_forward_hook(watching(name)) for name, module in model.named_modules() if name]
    try:
        yield lambda: found[0] if found else ""
    finally:
        for hook in hooks:
            hook.remove()


def _floats(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floats(item)
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))


def _digest(what: str, tokens: np.ndarray) -> str:
    return hashlib.sha256(what.encode() + np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()[:16]
