"""The forgetting curve: how well a model copies a text it has just read, against how well it would guess it.

    copy      [bos] S [bos] S        accuracy C(L) of the last ceil(L/2) tokens of the second S, teacher forcing
    control   [bos] I [bos] S        accuracy M(L) of the same tokens behind an irrelevant text I

Liu et al. 2024, arXiv 2410.04727, section 3. Three protocols:

`paper`   the authors' procedure: at each length and repeat a fresh target S, drawn from all but the last 2 L
          tokens of the whole text; I is always the last L tokens. Texts are joined, separators between them.
`nested`  ours: a repeat has one target, whose prefixes serve all lengths, so that each extends what was read for
          the one before; the irrelevant text is another repeat's target, so that one reading of S serves both
          halves. The same statistic with less text-to-text noise along the curve, at about half the cost.
          With a text of its own for I, the irrelevant prefixes are read beside.
`probe`   ours, for long texts: as `nested`, but of the second S only a slice is fed, w tokens to warm up and k that are
          scored: [bos] S [bos] S[a : a + w + k]. It costs w + k tokens a length instead of L, and what is
          asked for lies up to nearly the whole window back instead of half of it. The start a is 0, or at each
          of several depths: recall over length and depth from one reading. Lengths under w + k have
          w = k = floor(L / 2) and so ask what `nested` asks.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from farspan.files import read_json
from farspan.lm import LM
from farspan.reader import Reader, Scores
from farspan.record import Row
from farspan.schema import check_results
from farspan.spelling import written
from farspan.tasks.base import Example, Quality, Result, Work
from farspan.tasks.prompts import token_texts
from farspan.terminal import report
from farspan.text.corpora import Corpus, join, load

Protocol = Literal["paper", "nested", "probe"]
RING = 4  # repeats that lend each other their targets; more repeats are further rings, so that none changes
LONG = 8192  # tokens; curves that go further are probed, and with more tokens
RUN = 32  # tokens; texts that share so many in a row hold the same passage
MOST_OVERLAP = 0.5  # of a target's runs that its control reads before; more of them are reported
AUTHORS_SEPARATOR = 1  # the authors' script writes id 1 for any model; its id 2 stands last, where nothing reads it


@dataclass(frozen=True)
class Curve:
    """The forgetting curve of one target text and one irrelevant text."""

    target: Corpus
    prefix: Corpus | None = None  # I; None: the protocol's own (another target, or the end of the text)
    protocol: Protocol = "nested"
    compat: bool = False  # the authors' separator
    warmup: int = 128  # w, tokens
    scored: int = 256  # k, tokens
    depths: tuple[float, ...] = (0.0,)  # of the slice in its text: 0 at its beginning, 1 at its end
    window: int | None = None  # tokens drawn for each repeat; None: the largest length
    pool: int | None = None  # repeats drawn, of which the first are used; None: as many as asked for

    name: ClassVar[str] = "curve"
    version: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.scored < 1:
            raise ValueError(f"warm-up {self.warmup} and scored {self.scored} tokens: at least 0 and 1 are needed")
        if wrong := [depth for depth in self.depths if not 0 <= depth <= 1]:
            raise ValueError(f"depth {wrong[0]} lies outside the text: 0 is its beginning, 1 its end")
        check_depths(self.depths, self.protocol, (), 0)

    @property
    def settings(self) -> dict[str, Any]:
        probe = {"warmup": self.warmup, "scored": self.scored} if self.protocol == "probe" else {}
        return probe | {
            "protocol": self.protocol,
            "compat": self.compat,
            "target_text": self.target.name,
            "target_hash": self.target.hash,
            "prefix_text": self.prefix.name if self.prefix else None,
            "prefix_hash": self.prefix.hash if self.prefix else None,
        }

    def separator(self, lm: LM) -> tuple[int, ...]:
        return (AUTHORS_SEPARATOR,) if self.compat else lm.separator.ids

    def num_tokens(self, lm: LM, length: int) -> int:
        _, warmup, scored = self.slice_at(length, 0.0)
        return length + warmup + scored + 2 * len(self.separator(lm))

    def largest_length(self, lm: LM, context: int) -> int:
        """The largest length whose whole context has at most that many tokens; 0 or less: none."""
        room = context - 2 * len(self.separator(lm))
        both = self.warmup + self.scored
        return room - both if self.protocol == "probe" and room >= 2 * both else room // 2

    def slice_at(self, length: int, depth: float) -> tuple[int, int, int]:
        """Where the second part begins in S, its tokens that are only fed, and those that are scored."""
        if self.protocol != "probe":
            return 0, length - math.ceil(length / 2), math.ceil(length / 2)
        if length < self.warmup + self.scored:
            return 0, length // 2, max(1, length // 2)
        return round(depth * (length - self.warmup - self.scored)), self.warmup, self.scored

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example]:
        """The examples of all repeats. Without a text of their own for I, four repeats at a time lend each other their
        targets, in a ring, so that both halves are measured on the same targets.

        Raises:
            ValueError: a text too short, one repeat where another's target is needed, or depths in lengths that
                the slice fills.
        """
        separator = self.separator(lm)
        if self.protocol == "paper":
            return self._checked(list(self._paper(lm, lengths, repeats, seed)))
        check_depths(self.depths, self.protocol, lengths, self.warmup + self.scored)
        window, pool = self.window or lengths[-1], max(repeats, self.pool or repeats)
        if self.prefix is None:
            if repeats < 2:
                raise ValueError("one repeat has no other target to be its irrelevant text: use --repeats 2 or more")
            targets = self.target.windows(window, pool, seed)[:repeats]
            lent = _rings(repeats)
            texts = [
                {"target": s, "other": targets[j], "other_repeat": np.array(j)}
                for s, j in zip(targets, lent, strict=True)
            ]
        else:
            # one text, perhaps in shuffled order: what is read as irrelevant must not be what is asked for
            one_text = self.prefix.source == self.target.source
            drawn = 2 * pool if one_text else pool
            targets = self.target.windows(window, drawn, seed)[:repeats]
            first = pool if one_text else 0
            prefixes = self.prefix.windows(window, drawn, seed)[first : first + repeats]
            texts = [{"target": s, "prefix": i} for s, i in zip(targets, prefixes, strict=True)]
        return self._checked([_example(self, seed, i, tuple(lengths), separator, **t) for i, t in enumerate(texts)])

    def _checked(self, examples: list[Example]) -> list[Example]:
        """The examples; reports where a control reads most of what it asks for and so is a copy."""
        for example in examples:
            given = example.tokens
            read, asked = (given["prefix"], given["target"]) if "prefix" in given else (given["target"], given["other"])
            if overlap(read, asked) > MOST_OVERLAP:
                irrelevant = self.prefix.name if self.prefix else self.target.name
                report(
                    f"warning: the irrelevant text of repeat {example.repeat} holds most of its target, so its control "
                    f"is a copy: texts {self.target.name!r} and {irrelevant!r} have a passage in common, or one has it "
                    "twice. Remove the duplicates, or give another --prefix-text."
                )
                break
        return examples

    def _paper(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> Iterator[Example]:
        if self.target.shuffled or (self.prefix is not None and self.prefix.shuffled):
            raise ValueError("shuffled texts go with --protocol nested: the paper's protocol has none")

        def joined(text: Corpus) -> np.ndarray:
            return join((text.document(i) for i in range(text.num_documents)), lm.separator.ids)

        stream = joined(self.target)
        ending = joined(self.prefix) if self.prefix else stream
        for length in lengths:
            for text, tokens, needed in ((self.target, stream, 3 * length), (self.prefix, ending, length)):
                if text is not None and len(tokens) < needed:
                    raise ValueError(
                        f"text {text.name!r} has {len(tokens):,} tokens; the paper's protocol needs {needed:,} of it "
                        f"for a length of {length:,}: give a longer text or a smaller largest length"
                    )
            for repeat in range(repeats):
                begin = int(np.random.default_rng([seed, length, repeat]).integers(0, len(stream) - 3 * length + 1))
                # copies: a view would keep the whole text in memory
                target, prefix = stream[begin : begin + length].copy(), ending[len(ending) - length :].copy()
                yield _example(self, seed, repeat, (length,), self.separator(lm), target=target, prefix=prefix)

    def work(self, lm: LM, example: Example) -> Iterator[Work]:
        rows = 2 if "prefix" in example.tokens else 1
        separator = len(self.separator(lm))
        done = 0
        for length in example.cuts:
            yield Work(rows, separator + done, length - done, 0)
            for depth in example.depths if length in example.lengths else ():
                _, warmup, scored = self.slice_at(length, depth)
                yield Work(2, separator + length, separator + warmup + scored - 1, scored)
            done = length

    def shown(self, lm: LM, example: Example, length: int) -> dict[str, Any]:
        """The copy half of an example at one length in words: its parts, token by token, and how many of the last are
        scored."""
        _, warmup, scored = self.slice_at(length, 0.0)
        separator = token_texts(lm.tokenizer, self.separator(lm))
        target = token_texts(lm.tokenizer, example.tokens["target"][:length])
        parts = [["separator", separator], ["read", target], ["separator", separator]]
        asked = ["asked", target[: warmup + scored]]
        return {"length": length, "repeat": example.repeat, "parts": [*parts, asked], "scored": scored}

    def run(self, reader: Reader, batch: Sequence[Example]) -> Iterator[Result]:
        """Results of a batch of examples that share lengths and depths, shortest length and smallest depth first."""

        def rows(name: str) -> torch.Tensor:
            return torch.from_numpy(np.stack([example.tokens[name] for example in batch])).long()

        target = rows("target")
        if "prefix" in batch[0].tokens:
            read, asked = torch.cat([target, rows("prefix")]), torch.cat([target, target])
        else:
            read, asked = target, torch.cat([target, rows("other")])
        separator = torch.tensor([self.separator(reader.lm)])
        memory = reader.read(separator.expand(len(read), -1))
        done = 0
        for length in batch[0].cuts:
            memory.read(read[:, done:length])
            done = length
            for depth in batch[0].depths if length in batch[0].lengths else ():
                start, warmup, scored = self.slice_at(length, depth)
                second = torch.cat([separator.expand(len(asked), -1), asked[:, start : start + warmup + scored]], 1)
                scores = memory.score(second, slice(second.shape[1] - scored, None))
                for index, example in enumerate(batch):
                    values, failed = _judged(scores, index, index + len(batch))
                    values["context"] = separator.shape[1] + length + second.shape[1]
                    values["distance"] = separator.shape[1] + length - start
                    values["target"] = _digest(example.tokens["target"])
                    # whose target the control asked for: what pairs the two halves
                    values["control_repeat"] = int(example.tokens.get("other_repeat", np.array(example.repeat)))
                    yield Result(
                        example,
                        length,
                        depth,
                        values,
                        status="nan" if failed else "ok",
                        reason=f"{failed} scored tokens have no finite log-probability" if failed else "",
                        num_seen=memory.num_seen,
                        num_kept=memory.num_kept,
                    )


@dataclass(frozen=True)
class CurveQuestion:
    """The forgetting curve of the text at chosen lengths, each of a copy alone."""

    protocol: str = "nested"  # paper, nested or probe
    warmup: int = field(default=128, metadata={"quiet": True})  # tokens of a probe
    scored: int = field(default=256, metadata={"quiet": True})  # tokens of a probe

    unit: ClassVar[str] = "tokens"
    quality: ClassVar[Quality] = Quality("copy", "copy accuracy", higher_is_better=True)

    def __post_init__(self) -> None:
        if self.protocol not in get_args(Protocol):
            raise ValueError(f"protocol {self.protocol!r} is unknown; known are {', '.join(get_args(Protocol))}")
        if self.protocol != "probe" and (self.warmup, self.scored) != (128, 256):
            raise ValueError(
                f"warmup and scored belong to protocol=probe, not to protocol={self.protocol}: add protocol=probe, or "
                "leave them out"
            )

    def __str__(self) -> str:
        return written("curve", self)

    def on(self, lm: LM, text: str) -> Curve:
        protocol: Protocol = self.protocol  # type: ignore[assignment]
        return Curve(load(text, lm.tokenizer), protocol=protocol, warmup=self.warmup, scored=self.scored)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Eight, evenly spaced, to a whole context of about twice the largest trained length."""
        return tuple(max(trained) * i // 8 for i in range(1, 9))


def check_depths(depths: Sequence[float], protocol: str, lengths: Sequence[int], probe: int) -> None:
    """Raise ValueError unless these depths, if there are several, can be probed with `probe` tokens in each length."""
    if tuple(depths) == (0.0,):
        return
    if protocol != "probe":
        raise ValueError(f"depths need --protocol probe; {protocol} asks for the whole text")
    if lengths and lengths[0] <= probe:
        raise ValueError(
            f"a length of {lengths[0]:,} has no depths: the {probe:,} tokens of --warmup and --scored fill it; "
            f"use lengths from {probe + 1:,} on, or smaller --warmup and --scored"
        )


def read_authors_file(path: str | Path, model: str) -> list[Row]:
    """Rows of a result file of the authors' script: a list of {"length", "copy_accs", "lm_accs"}.

    Raises:
        ValueError: not such a file.
    """
    path = Path(path)
    what = (
        "is not a result file of the forgetting curve's authors, a JSON list of objects with length, copy_accs, lm_accs"
    )
    try:
        points = read_json(path)
        check_results(points)
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist: expected a result file of the forgetting curve's authors") from error
    except ValueError as error:
        raise ValueError(f"{path} {what}: {error}. Correct the file") from error
    return [
        Row(
            model=model,
            method="full",
            task=Curve.name,
            version=Curve.version,
            settings={
                "protocol": "paper",
                "compat": True,
                "target_text": "PG-19 test",
                "imported": path.name,
            },
            length=point["length"],
            repeat=repeat,
            seed=0,
            example=f"{path.name}:{point['length']}:{repeat}",
            scores={
                "copy": float(copy),
                "control": float(control),
                "control_repeat": repeat,
                "scored": math.ceil(point["length"] / 2),
                "context": 2 * point["length"] + 2,
            },
        )
        for point in points
        for repeat, (copy, control) in enumerate(zip(point["copy_accs"], point["lm_accs"], strict=True))
    ]


def _judged(scores: Scores, copy: int, control: int) -> tuple[dict[str, Any], int]:
    """The two halves of one example as a row holds them, and how many of their tokens have no numbers."""
    values: dict[str, Any] = {"scored": scores.rank.shape[1]}
    failed = 0
    for name, row in (("copy", copy), ("control", control)):
        nats, rank = scores.nats[row], scores.rank[row]
        missing = int((~nats.isfinite()).sum())
        failed += missing
        hits = (rank == 0).cpu().numpy()
        values[name] = float(hits.mean())
        values[f"{name}_nats"] = None if missing else float(nats.cpu().double().mean())
        values[f"{name}_hits"] = np.packbits(hits).tobytes().hex()
    return values, failed


def _example(
    task: Curve,
    seed: int,
    repeat: int,
    lengths: tuple[int, ...],
    separator: tuple[int, ...],
    **tokens: np.ndarray,
) -> Example:
    protocol = f"{task.protocol} {task.warmup} {task.scored}" if task.protocol == "probe" else task.protocol
    digest = hashlib.sha256(f"{task.name} {task.version} {protocol} {separator} {seed} {repeat}".encode())
    for name, ids in sorted(tokens.items()):
        digest.update(name.encode() + np.asarray(ids, dtype=np.int64).tobytes())
    return Example(digest.hexdigest()[:16], repeat, lengths, tokens, task.depths)


def _digest(ids: np.ndarray) -> str:
    """Of a target: what tells that two rows asked for the same."""
    return hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest()[:16]


def overlap(read: np.ndarray, asked: np.ndarray) -> float:
    """The share of the runs of 32 tokens in `asked` (all of it, if shorter) that also occur in `read`."""
    size = min(RUN, len(asked), len(read))
    if not size:
        return 0.0
    factors = np.random.default_rng(0).integers(1, 1 << 62, size, dtype=np.uint64)
    hashes = [sliding_window_view(ids.astype(np.uint64), size) @ factors for ids in (read, asked)]
    return float(np.isin(hashes[1], hashes[0]).mean())


def _rings(repeats: int) -> list[int]:
    """Whose target each repeat's control asks for: the one before it in its ring. A single one left over joins the
    last ring."""
    starts = [start for start in range(0, repeats, RING) if repeats - start > 1] or [0]
    lent = []
    for start, end in zip(starts, [*starts[1:], repeats], strict=True):
        lent += [end - 1, *range(start, end - 1)]
    return lent
