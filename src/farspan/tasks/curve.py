"""The forgetting curve: how well a model copies a text it has just read, compared with how well it guesses that text.

    copy      [bos] S [bos] S        accuracy C(L) of the last ceil(L/2) tokens of the second S, teacher forcing
    control   [bos] I [bos] S        accuracy M(L) of the same tokens after an irrelevant text I

Liu et al. 2024, arXiv 2410.04727, section 3. Three protocols:

`paper`   the authors' procedure: at each length and repeat a new target S, sampled from all but the last 2 L
          tokens of the whole text; I is always the last L tokens. Texts are joined, separators between them.
`nested`  ours: a repeat has one target, whose prefixes serve all lengths, so each length continues the reading of
          the one before; the irrelevant text is another repeat's target, so one reading of S serves both
          halves. The same statistic with less text-to-text noise along the curve, at about half the cost.
          If I has a text of its own, its prefixes are read as further rows.
`probe`   ours, for long texts: as `nested`, but only a slice of the second S is fed, w tokens to warm up and k that are
          scored: [bos] S [bos] S[a : a + w + k]. It costs w + k tokens per length instead of L, and the scored
          tokens are up to nearly a whole window away instead of half of it. The start a is 0, or at each
          of several depths: recall over length and depth from one reading. Lengths under w + k have
          w = k = floor(L / 2) and so score the same tokens as `nested`, but for the last one of an odd L.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from farspan.lengths import DEFAULT_POINTS, refuse_depths, spaced_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM
from farspan.reader import Reader, Scores
from farspan.specs import choice, limited
from farspan.tasks.base import Bound, Example, Parts, Quality, Result, Work, digest, not_finite
from farspan.tasks.copy_task import MEAN_RECALLED, RECALLED, CopyTask
from farspan.terminal import report
from farspan.text.corpora import Corpus, join
from farspan.text.names import described

PROTOCOLS = ("paper", "nested", "probe")
RING = 4  # repeats that share their targets; more repeats form new rings, so that earlier ones do not change
NESTED_TO = 4096  # tokens; curves that go further, so contexts of more than 8,192, are probed
RUN = 32  # tokens; texts that share so many in a row hold the same passage
MOST_OVERLAP = 0.5  # share of a target's runs that its control may have read; more is reported
AUTHORS_SEPARATOR = 1  # the authors' script uses id 1 for any model; it puts id 2 last, where it has no effect


@dataclass(frozen=True)
class Texts:
    """The tokens of one repeat, [largest length] each. Either `prefix` or `other` is given."""

    target: np.ndarray  # S
    prefix: np.ndarray | None = None  # I, a text of its own
    other: np.ndarray | None = None  # another repeat's target, on which the control is scored
    other_repeat: int | None = None

    @property
    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all parts by name, for a hash."""
        repeat = None if self.other_repeat is None else np.array(self.other_repeat)
        parts = {"other": self.other, "other_repeat": repeat, "prefix": self.prefix, "target": self.target}
        yield from ((name, ids) for name, ids in parts.items() if ids is not None)


@dataclass(frozen=True)
class Curve(CopyTask):
    """The forgetting curve of the text."""

    protocol: str | None = choice(PROTOCOLS, None)  # None: nested, beyond NESTED_TO and with depths probe
    warmup: int | None = limited(None, 0, quiet=True)  # w, tokens; None: 128, beyond LONG 512
    scored: int | None = limited(None, 1, quiet=True)  # k, tokens; None: 256, beyond LONG 1,024
    depths: tuple[float, ...] = field(default=(0.0,), metadata={"quiet": True})  # of the slice in its text: 0 to 1
    target_text: str | None = None  # S; None: the text of the measurement; `shuffled`: in shuffled order
    prefix_text: str | None = None  # I; None: the protocol's own
    compat: bool = field(default=False, metadata={"quiet": True})  # the authors' token ids

    name: ClassVar[str] = "curve"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in (None, "probe") and (self.warmup, self.scored) != (None, None):
            raise ValueError(
                f"warmup and scored belong to protocol=probe, not to protocol={self.protocol}: add protocol=probe, or "
                "leave them out (--warmup, --scored, --protocol)"
            )
        refuse_depths(self.depths)
        if self.protocol not in (None, "probe") and self.depths != (0.0,):
            raise ValueError(f"depths need --protocol probe; {self.protocol} scores the whole text")

    @property
    def quality(self) -> Quality:
        name = RECALLED if self.depths == (0.0,) else MEAN_RECALLED
        return Quality("copy - control", name, higher_is_better=True, graded=True)

    @property
    def probe(self) -> tuple[int, int]:
        """w and k, tokens."""
        return self.probe_tokens(0, None)

    def resolved(self, lengths: Sequence[int] | None, trained: Sequence[int]) -> Self:
        largest = lengths[-1] if lengths else max(trained)
        protocol = self.protocol or ("probe" if self.depths != (0.0,) or largest > NESTED_TO else "nested")
        if protocol != "probe":
            return replace(self, protocol=protocol)
        context = None if self.depths == (0.0,) else lengths[0] if lengths else 2 * max(trained)
        warmup, scored = self.probe_tokens(largest, context, always=not lengths)
        return replace(self, protocol=protocol, warmup=warmup, scored=scored)

    def check(self, lengths: Sequence[int]) -> None:
        if self.depths != (0.0,) and lengths[0] <= (probe := sum(self.probe)):
            raise ValueError(
                f"lengths up to {probe:,} tokens, which --warmup and --scored need, are too short for depths: give "
                "longer ones, or smaller --warmup and --scored"
            )

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return eight lengths, evenly spaced, to a whole context of about twice the largest trained length."""
        longest = self.longest_of(2 * max(trained))
        return tuple(longest * i // 8 for i in range(1, 9))

    def longest_of(self, tokens: int) -> int:
        """Return the largest length whose text and second part have at most so many tokens together."""
        both = sum(self.probe)
        return tokens - both if self.protocol == "probe" and tokens >= 2 * both else tokens // 2

    def on(self, lm: LM, text: str) -> "BoundCurve":
        probe = {"warmup": self.warmup, "scored": self.scored} if self.protocol == "probe" else {}
        self.refuse_open(protocol=self.protocol, **probe)
        target, prefix = self.named_texts(lm, text)
        return BoundCurve(**vars(self), target=target, prefix=prefix)


@dataclass(frozen=True, kw_only=True)
class BoundCurve(Curve, Bound[Texts]):
    """The forgetting curve of one target text and one irrelevant text."""

    target: Corpus
    prefix: Corpus | None = None  # I; None: the protocol's own (another target, or the end of the text)
    window: int | None = None  # tokens sampled for each repeat; None: the largest length
    pool: int | None = None  # repeats sampled, of which the first are used; None: the number measured

    task: ClassVar[str] = "curve"
    needs_nats: ClassVar[bool] = False
    version: ClassVar[int] = 3

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return self.samples_windows

    @property
    def samples_windows(self) -> bool:
        """Whether a repeat has one text for all lengths."""
        return self.protocol != "paper"

    @property
    def settings(self) -> dict[str, Any]:
        warmup, scored = self.probe
        probe = {"warmup": warmup, "scored": scored} if self.protocol == "probe" else {}
        return probe | {
            "protocol": self.protocol,
            "compat": self.compat,
            "target_text": self.target.name,
            "target_hash": self.target.hash,
            "prefix_text": self.prefix.name if self.prefix else None,
            "prefix_hash": self.prefix.hash if self.prefix else None,
        }

    @property
    def texts(self) -> tuple[Corpus, ...]:
        if self.prefix is None or self.prefix.hash == self.target.hash:
            return (self.target,)
        return self.target, self.prefix

    def separator(self, lm: LM) -> tuple[int, ...]:
        return (AUTHORS_SEPARATOR,) if self.compat else lm.separator.ids

    def num_tokens(self, lm: LM, example: Example[Texts], length: int) -> int:
        _, warmup, scored = self.slice_at(length, 0.0)
        return length + warmup + scored + 2 * len(self.separator(lm))

    def largest_length(self, lm: LM, context: int) -> int:
        """Return the largest length whose whole context has at most `context` tokens; 0 or less: none."""
        return self.longest_of(context - 2 * len(self.separator(lm)))

    def slice_at(self, length: int, depth: float) -> tuple[int, int, int]:
        """Return where the second part begins in S, and its numbers of warm-up and scored tokens."""
        if self.protocol != "probe":
            return 0, length - math.ceil(length / 2), math.ceil(length / 2)
        warmup, scored = self.probe
        if length < warmup + scored:
            return 0, length // 2, max(1, length // 2)
        return round(depth * (length - warmup - scored)), warmup, scored

    def windows_read(self, lm: LM, lengths: Sequence[int], repeats: int) -> list[tuple[Corpus, int, int]]:
        if not self.samples_windows:
            return []
        window, pool = self._sampled(lengths, repeats)
        return [(text, window, self._count(pool)) for text in self.texts]

    def _sampled(self, lengths: Sequence[int], repeats: int) -> tuple[int, int]:
        """Return the tokens sampled for each repeat, and how many repeats are sampled."""
        return self.window or lengths[-1], max(repeats, self.pool or repeats)

    def _count(self, pool: int) -> int:
        """Return how many windows of a text are sampled: twice as many if its other half is the irrelevant part."""
        one_text = self.prefix is not None and self.prefix.source == self.target.source
        return 2 * pool if one_text else pool

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[Texts]]:
        """Return the examples of all repeats. If I has no text of its own, groups of four repeats use each other's
        targets, in a ring, so that both halves are measured on the same targets.

        Raises:
            ValueError: a text too short, one repeat where another's target is needed, or depths in lengths no
                longer than the slice.
        """
        if self.protocol == "paper":
            return self._checked(list(self._paper(lm, lengths, repeats, seed)))
        self.check(lengths)
        window, pool = self._sampled(lengths, repeats)
        if self.prefix is None:
            if repeats < 2:
                raise ValueError(
                    "repeats: got 1, expected at least 2, since each text is the control of another (--repeats)"
                )
            targets = self.target.windows(window, pool, seed)[:repeats]
            lent = _rings(repeats)
            texts = [Texts(s, other=targets[j], other_repeat=j) for s, j in zip(targets, lent, strict=True)]
        else:
            # one text, possibly shuffled: the irrelevant part must not be the target
            count = self._count(pool)
            targets = self.target.windows(window, count, seed)[:repeats]
            first = count - pool
            prefixes = self.prefix.windows(window, count, seed)[first : first + repeats]
            texts = [Texts(s, prefix=i) for s, i in zip(targets, prefixes, strict=True)]
        return self._checked([self._example(lm, seed, i, tuple(lengths), t) for i, t in enumerate(texts)])

    def _checked(self, examples: list[Example[Texts]]) -> list[Example[Texts]]:
        """Return the examples; report a control that reads most of its own target and is therefore a copy."""
        for example in examples:
            read, scored = (texts := example.payload).target, texts.other
            if texts.prefix is not None:
                read, scored = texts.prefix, texts.target
            if scored is not None and overlap(read, scored) > MOST_OVERLAP:
                passage = f"{described(self.target.name)} has a passage twice"
                if self.prefix is not None and self.prefix.name != self.target.name:
                    both = f"{described(self.target.name)} and {described(self.prefix.name)}"
                    passage = f"{both} have a passage in common, or one has it twice"
                report(
                    f"warning: the irrelevant text of repeat {example.repeat} holds most of its target, so its control "
                    f"is a copy: {passage}. Remove the duplicates, or give another --prefix-text."
                )
                break
        return examples

    def _paper(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> Iterator[Example[Texts]]:
        if self.target.shuffled or (self.prefix is not None and self.prefix.shuffled):
            raise ValueError("shuffled texts need --protocol nested: the paper's protocol has none")

        def joined(text: Corpus) -> np.ndarray:
            return join((text.document(i) for i in range(text.num_documents)), lm.separator.ids)

        stream = joined(self.target)
        ending = joined(self.prefix) if self.prefix else stream
        for length in lengths:
            for text, tokens, needed in ((self.target, stream, 3 * length), (self.prefix, ending, length)):
                if text is not None and len(tokens) < needed:
                    raise ValueError(
                        f"{described(text.name)} has {len(tokens):,} tokens; the paper's protocol needs {needed:,} of "
                        f"it for a length of {length:,}: give a longer text or a smaller largest length"
                    )
            for repeat in range(repeats):
                begin = int(np.random.default_rng([seed, length, repeat]).integers(0, len(stream) - 3 * length + 1))
                # copies: a view would keep the whole text in memory
                target, prefix = stream[begin : begin + length].copy(), ending[len(ending) - length :].copy()
                yield self._example(lm, seed, repeat, (length,), Texts(target, prefix))

    def _example(self, lm: LM, seed: int, repeat: int, lengths: tuple[int, ...], texts: Texts) -> Example[Texts]:
        probe = " {} {}".format(*self.probe) if self.protocol == "probe" else ""
        what = f"{self.task} {self.version} {self.protocol}{probe} {self.separator(lm)} {seed} {repeat}"
        parts = (part for named in texts.named for part in named)
        return Example(digest(what, *parts), repeat, lengths, texts, self.depths)

    def work(self, lm: LM, example: Example[Texts]) -> Iterator[Work]:
        rows = 1 if example.payload.prefix is None else 2
        separator = len(self.separator(lm))
        yield Work(rows, 0, separator, 0)
        done = 0
        for length in example.cuts:
            yield Work(rows, separator + done, length - done, 0)
            for depth in example.depths if length in example.lengths else ():
                _, warmup, scored = self.slice_at(length, depth)
                yield Work(2, separator + length, separator + warmup + scored - 1, scored)
            done = length

    def parts(self, lm: LM, example: Example[Texts], length: int) -> Parts:
        """Return the parts of the copy half."""
        _, warmup, scored = self.slice_at(length, 0.0)
        separator, target = ("separator", self.separator(lm)), example.payload.target[:length]
        return [separator, ("read", target), separator, ("asked", target[: warmup + scored])], scored

    def run(self, reader: Reader, batch: Sequence[Example[Texts]]) -> Iterator[Result]:
        """Yield results of a batch, shortest length and smallest depth first."""

        def rows(name: str) -> torch.Tensor:
            return torch.from_numpy(np.stack([getattr(example.payload, name) for example in batch])).long()

        target = rows("target")
        if batch[0].payload.prefix is not None:
            read, fed = torch.cat([target, rows("prefix")]), torch.cat([target, target])
        else:
            read, fed = target, torch.cat([target, rows("other")])
        separator = torch.tensor([self.separator(reader.lm)])
        head = separator.expand(len(read), -1)
        memory = reader.read(head) if reader.incremental else None
        done = 0
        for length in batch[0].cuts:
            if memory is not None and reader.incremental:
                memory.read(read[:, done:length])
            elif length in batch[0].lengths:
                memory = None  # freed before the next one is read
                memory = reader.read(read[:, :length], head=head)
            done = length
            for depth in batch[0].depths if length in batch[0].lengths else ():
                start, warmup, scored = self.slice_at(length, depth)
                second = torch.cat([separator.expand(len(fed), -1), fed[:, start : start + warmup + scored]], 1)
                assert memory is not None
                scores = memory.score(second, slice(second.shape[1] - scored, None))
                for index, example in enumerate(batch):
                    values, failed = _judged(scores, index, index + len(batch))
                    values["context"] = separator.shape[1] + length + second.shape[1]
                    values["distance"] = separator.shape[1] + length - start
                    values["target"] = digest(example.payload.target)
                    # the repeat whose target the control was scored on; it pairs the two halves
                    other = example.payload.other_repeat
                    values["control_repeat"] = example.repeat if other is None else other
                    yield Result.of(example, length, memory, values, not_finite(failed), depth)

    def auto_lengths(self, lm: LM, repeats: int, *, quiet: bool = False) -> tuple[int, ...]:
        """Return 16 lengths, evenly spaced, to a context of twice the trained length or the limit of positions."""
        longest = self.longest(lm, 2)
        return spaced_lengths(max(1, longest // DEFAULT_POINTS), longest, DEFAULT_POINTS)

    def longest(self, lm: LM, contexts: int) -> int:
        """Return the largest length whose whole context fits `contexts` trained lengths and the positions."""
        context = contexts * (lm.trained_length or DEFAULT_TRAINED_LENGTH)
        return max(1, self.largest_length(lm, min(context, lm.position_limit or context)))


def _judged(scores: Scores, copy: int, control: int) -> tuple[dict[str, Any], int]:
    """Return the row's values of both halves of an example, and how many of their tokens have no finite numbers."""
    values: dict[str, Any] = {"scored": scores.rank.shape[1]}
    failed = 0
    for name, row in (("copy", copy), ("control", control)):
        nats, rank = scores.nats[row], scores.rank[row]
        failed += int(scores.failed[row].sum())
        missing = not bool(nats.isfinite().all())
        hits = (rank == 0).cpu().numpy()
        values[name] = float(hits.mean())
        values[f"{name}_nats"] = None if missing else float(nats.cpu().double().mean())
        values[f"{name}_hits"] = np.packbits(hits).tobytes().hex()
    return values, failed


def overlap(read: np.ndarray, scored: np.ndarray) -> float:
    """Return the share of the runs of 32 tokens in `scored` (all of it, if shorter) that also occur in `read`."""
    size = min(RUN, len(scored), len(read))
    if not size:
        return 0.0
    factors = np.random.default_rng(0).integers(1, 1 << 62, size, dtype=np.uint64)
    hashes = [sliding_window_view(ids.astype(np.uint64), size) @ factors for ids in (read, scored)]
    return float(np.isin(hashes[1], hashes[0]).mean())


def _rings(repeats: int) -> list[int]:
    """Return the repeat whose target each control is scored on: the one before it in its ring. A single repeat left
    over joins the last ring."""
    starts = [start for start in range(0, repeats, RING) if repeats - start > 1] or [0]
    lent = []
    for start, end in zip(starts, [*starts[1:], repeats], strict=True):
        lent += [end - 1, *range(start, end - 1)]
    return lent
