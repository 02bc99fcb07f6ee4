"""LongPPL: perplexity of the key tokens, those that need the long context.

    gain(i)  = nats(i | short context) - nats(i | long context)
    key      = {i : gain(i) > alpha and nats(i | long context) < beta}
    LongPPL  = exp(mean of nats(i | long context) over the key tokens)

Fang et al. 2024, arXiv 2410.23771, with their alpha = 2 and beta = 2 nats. The long context of a target is that of the
task `perplexity` at the same length and with the same `targets`. For the short one, the targets are divided into blocks
of `block` tokens; the short contexts of a block begin `short` tokens before it, so they have `short` to
`short + block - 1` tokens after the separator. The paper has short=4096,block=1024. With targets=fixed the short
contexts are read once for all lengths. With targets=all the first `short + block` tokens are not scored: their short
context is all of the long one, or all but a block of it.

    tokens fed for n targets = length + n · (1 + short / block)     at most 1.25 · length by default

The paper chooses the key tokens of all models with one strong model. Here `keys` chooses them:

`keys=own`  with the model and method that are measured. Then LongPPL is at most exp(beta), and a method that uses the
            long context less has fewer key tokens, not a higher LongPPL: read the share of key tokens first.
`keys=RUN`  with the model and method of an earlier run of this task on the same tokens: all models and methods are
            scored on its key tokens, as in the paper. No short context is read.

LongPPL of an example without key tokens is absent (status "no_keys"); its share is 0. The quality is the mean over the
examples of the mean over their key tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from farspan.files import expanded
from farspan.lengths import doubled_lengths
from farspan.lm import LM
from farspan.reader import Reader
from farspan.record import by_key, latest, read_rows
from farspan.specs import choice, limited
from farspan.stats import unpacked
from farspan.tasks.base import BoundText, Example, Parts, Quality, Result, Task, Work, digest, not_finite
from farspan.tasks.perplexity import TARGETS, BoundPerplexity, Reading
from farspan.text.corpora import load

SHORT = 1024  # tokens; an eighth of the shortest length, if that is less
OWN = "own"  # key tokens are chosen with the model that is measured


@dataclass(frozen=True)
class LongPPL(Task):
    """Nats of the tokens that the long context makes easier."""

    targets: str = choice(TARGETS, "fixed")
    target_tokens: int | None = limited(None, 1)  # default: as many as `short`; with keys=RUN, the run's
    # tokens before each block; default: 1,024, or an eighth of the shortest length
    short: int | None = limited(None, 1)
    block: int | None = limited(None, 1, quiet=True)  # targets; default: as many as `short`
    alpha: float = field(default=2.0, metadata={"quiet": True})  # nats; a key token gains more
    beta: float = field(default=2.0, metadata={"quiet": True})  # nats; a key token has fewer after the long context
    keys: str = field(default=OWN, metadata={"quiet": True})  # own, or the folder of a run of this task

    name: ClassVar[str] = "longppl"
    details: ClassVar[tuple[str, ...]] = ("share", "keys")
    quality: ClassVar[Quality] = Quality("nats", "LongPPL", higher_is_better=False, exp=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets == "all" and self.target_tokens is not None:
            raise ValueError(
                f"target_tokens={self.target_tokens} belongs to targets=fixed or last; targets=all scores every token "
                "after the first short + block: leave out one of the two"
            )
        if not (0 <= self.alpha < np.inf and 0 < self.beta < np.inf):
            raise ValueError(
                f"alpha = {self.alpha:g} and beta = {self.beta:g}: expected nats, alpha at least 0 and beta above 0"
            )
        if self.keys != OWN and replace(self, keys=OWN) != LongPPL():
            raise ValueError(
                f"keys={self.keys} has chosen its key tokens with targets, target_tokens, short, block, alpha and beta "
                "of its own: leave these out, or choose the key tokens here (keys=own)"
            )

    def resolved(self, lengths: Sequence[int] | None, trained: Sequence[int]) -> "LongPPL":
        if self.keys != OWN:
            return self
        shortest = lengths[0] if lengths else min(trained)
        short = self.short or max(1, min(SHORT, shortest // 8))
        targets = None if self.targets == "all" else self.target_tokens or short
        return replace(self, short=short, block=self.block or short, target_tokens=targets)

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError unless the long context of every target is longer than its short one at all lengths."""
        if self.keys == OWN and lengths[0] < self.least:
            raise ValueError(
                f"short={self.short} leaves no longer context in {lengths[0]:,} tokens: give lengths from "
                f"{self.least:,} on (--lengths), or a shorter one (longppl:short=N)"
            )

    @property
    def least(self) -> int:
        """The shortest length at which every long context is longer than the short one."""
        assert self.short is not None
        assert self.block is not None
        return self.short + (self.target_tokens or self.block) + 1

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return the smallest trained length that is long enough, or its double, and so on, to twice the largest; with
        keys=RUN, the run's lengths."""
        if self.keys != OWN:
            return tuple(sorted({length for _, length in key_tokens(self.keys).bits}))
        first = min(trained)
        while first < self.resolved(None, (first,)).least:
            first *= 2
        return doubled_lengths(first, trained)

    def on(self, lm: LM, text: str) -> "BoundLongPPL":
        chosen = None if self.keys == OWN else key_tokens(self.keys)
        if chosen is None:
            targets = {} if self.targets == "all" else {"target_tokens": self.target_tokens}
            self.refuse_open(short=self.short, block=self.block, **targets)
        return BoundLongPPL(how=chosen.how if chosen else self, chosen=chosen, text=load(text, lm.tokenizer))


@dataclass(frozen=True)
class KeyTokens:
    """The key tokens that one model under one method chose."""

    by: str  # model and method
    how: LongPPL  # the settings
    bits: Mapping[tuple[str, int], str]  # by hash of the targets and length: a bit per target, packed, hexadecimal


@dataclass(frozen=True, kw_only=True)
class BoundLongPPL(BoundText[np.ndarray]):
    """LongPPL of one text. An example's payload is a window, [tokens of the largest length]."""

    task: ClassVar[str] = "longppl"
    version: ClassVar[int] = 1

    how: LongPPL  # all settings chosen
    chosen: KeyTokens | None = None  # of another run; None: the key tokens are the measured model's own

    @cached_property
    def settings(self) -> dict[str, Any]:
        what = vars(self.how) | self.text.named
        if self.chosen is None:
            return what
        return what | {"keys": self.chosen.by, "keys_hash": digest(json.dumps(sorted(self.chosen.bits.items())))}

    @cached_property
    def _long(self) -> BoundPerplexity:
        """The task `perplexity` that reads and scores the long contexts."""
        return BoundPerplexity(targets=self.how.targets, target_tokens=self.how.target_tokens, text=self.text)

    def span(self, window: int, length: int) -> tuple[int, int]:
        """Return the beginning and the end of the targets in a window of tokens."""
        _, first, end = self._long.span(window, length)
        return first + (self.how.least - 1 if self.how.targets == "all" else 0), end

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[np.ndarray]]:
        """Return the windows of the task `perplexity`.

        Raises:
            ValueError: a length at which the long context is no longer than the short one, a text too short, or
                windows without a row in the run of `keys`.
        """
        self.how.check(lengths)
        what = f"{self.task} {self.version} {json.dumps(self.settings)} {lm.separator.ids} {seed}"
        found = [
            replace(example, id=digest(f"{what} {example.repeat}", example.payload))
            for example in self._long.examples(lm, lengths, repeats, seed)
        ]
        if self.chosen is not None:
            for example in found:
                for length in lengths:
                    self._check_chosen(self.chosen, example, length)
        return found

    def _check_chosen(self, chosen: KeyTokens, example: Example[np.ndarray], length: int) -> None:
        if (self._target(example, length), length) not in chosen.bits:
            raise ValueError(
                f"the run of keys, by {chosen.by}, has no key tokens for repeat {example.repeat} at {length:,} tokens: "
                "measure it with the same text, lengths, repeats and seed, and with a model of the same tokenizer"
            )

    def _target(self, example: Example[np.ndarray], length: int) -> str:
        """Return the hash of the targets."""
        first, end = self.span(len(example.payload), length)
        return digest(example.payload[first:end])

    def work(self, lm: LM, example: Example[np.ndarray]) -> Iterator[Work]:
        yield from self._long.work(lm, example)
        if self.chosen is not None:
            return
        separator = len(lm.separator.ids)
        for length in example.lengths[:1] if self.how.targets == "fixed" else example.lengths:
            for before, begin, end in self._blocks(*self.span(len(example.payload), length)):
                yield Work(1, 0, separator + begin - before, 0)
                yield Work(1, separator + begin - before, end - begin - 1, end - begin)

    def _blocks(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """Return, for each block of the targets, where its short context begins, and its own beginning and end."""
        assert self.how.short is not None
        assert self.how.block is not None
        begins = range(first, end, self.how.block)
        return [(begin - self.how.short, begin, min(begin + self.how.block, end)) for begin in begins]

    def run(self, reader: Reader, batch: Sequence[Example[np.ndarray]]) -> Iterator[Result]:
        """Yield results of a batch, shortest length first."""
        text = torch.from_numpy(np.stack([example.payload for example in batch])).long()
        short: Tensor | None = None
        for reading in self._long.readings(reader, batch):
            first, end = self.span(text.shape[1], reading.length)
            long = reading.scores.nats[:, first - end :]
            if self.chosen is None and (short is None or self.how.targets != "fixed"):
                short = self._short_nats(reader, text, first, end)
            for index, example in enumerate(batch):
                values, status, reason = self._judged(
                    long[index].cpu().double().numpy(),
                    None if short is None else short[index].cpu().double().numpy(),
                    target := self._target(example, reading.length),
                    reading,
                )
                values |= {"context": len(reader.lm.separator.ids) + reading.length, "target": target}
                counts = reading.num_seen, reading.num_kept
                yield Result(example, reading.length, 0.0, values, status, reason, *counts)

    def around(self, reader: Reader) -> AbstractContextManager[None]:
        return self._long.around(reader)

    def parts(self, lm: LM, example: Example[np.ndarray], length: int) -> Parts:
        """Return the parts of the long reading."""
        first, end = self.span(len(example.payload), length)
        return self._long.parts(lm, example, length)[0], end - first

    def _judged(
        self, nats: np.ndarray, short: np.ndarray | None, target: str, reading: Reading
    ) -> tuple[dict[str, Any], str, str]:
        """Return the scores of one example at one length, and the status and reason of its row.

        Args:
            nats: of the targets, after the long context.
            short: the same after the short one.
            target: the hash of the targets.
        """
        count = len(nats)
        if failed := int(sum((~np.isfinite(values)).sum() for values in (nats, short) if values is not None)):
            reason = "; ".join(part for part in (not_finite(failed), reading.broken) if part)
            return {"nats": None, "scored": count}, "nan", reason
        if short is not None:
            keys = (short - nats > self.how.alpha) & (nats < self.how.beta)
            reason = (
                f"none of the {count:,} targets gains more than {self.how.alpha:g} nats from the long context and then "
                f"takes less than {self.how.beta:g}"
            )
        else:
            assert self.chosen is not None
            keys = unpacked(self.chosen.bits[target, reading.length], count).astype(bool)
            reason = f"the {count:,} targets have no key token of {self.chosen.by}"
        values: dict[str, Any] = {
            "nats": float(nats[keys].mean()) if keys.any() else None,
            "keys": int(keys.sum()),
            "share": float(keys.mean()),
            "scored": count,
            "nats_all": float(nats.mean()),
            "key_bits": np.packbits(keys).tobytes().hex(),
        }
        values |= {} if short is None else {"nats_short": float(short.mean())}
        return values, *(("ok", "") if keys.any() else ("no_keys", reason))

    def _short_nats(self, reader: Reader, text: Tensor, first: int, end: int) -> Float[Tensor, "batch targets"]:
        """Return the nats of the targets of a batch after their short contexts."""
        head = torch.tensor([reader.lm.separator.ids]).expand(len(text), -1)
        blocks = self._blocks(first, end)
        capacity = reader.capacity  # that of the long reading
        reader.capacity = head.shape[1] + max(end - before for before, _, end in blocks)
        parts = []
        try:
            for before, begin, stop in blocks:
                context = text[:, before:begin]
                if reader.incremental:  # one forward less, with the same result
                    memory = reader.read(torch.cat([head, context], 1))
                else:
                    memory = reader.read(context, head=head)
                parts.append(memory.score(text[:, begin:stop]).nats)
        finally:
            reader.capacity = capacity
        return torch.cat(parts, 1)


def key_tokens(folder: str) -> KeyTokens:
    """Return the key tokens of a run of this task with keys=own.

    Raises:
        ValueError: no run, or its rows have no key tokens, or those of several models, methods or settings.
    """
    of_task = (row for row in latest(read_rows(expanded(folder))) if row.task == BoundLongPPL.task)
    own = (row for row in of_task if row.settings.get("keys") == OWN and "key_bits" in row.scores)
    found = by_key((f"{row.model} {row.method} {json.dumps(row.settings, sort_keys=True)}", row) for row in own)
    if len(found) != 1:
        raise ValueError(
            f"keys={folder} holds the key tokens of {len(found)} models, methods and settings, expected those of one: "
            f"give {OWN}, or the folder of a run of longppl with one model and one method"
        )
    [rows] = found.values()
    how = {one.name: rows[0].settings[one.name] for one in fields(LongPPL)}
    bits = {(row.scores["target"], row.length): row.scores["key_bits"] for row in rows}
    return KeyTokens(f"{rows[0].model} {rows[0].method}", LongPPL(**how), bits)
