"""The forgetting curve: how well a model copies a text it has just read, against how well it would guess it.

    copy      [bos] S [bos] S        accuracy C(L) of the last ceil(L/2) tokens of the second S, teacher forcing
    control   [bos] I [bos] S        accuracy M(L) of the same tokens behind an irrelevant text I

Liu et al. 2024, arXiv 2410.04727, section 3. Two protocols:

`paper`   the authors' procedure: at each length and repeat a fresh target S, drawn from all but the last 2 L
          tokens of the whole text; I is always the last L tokens. Texts are joined, separators between them.
`nested`  ours: a repeat has one target, whose prefixes serve all lengths, so that each extends what was read for
          the one before; the irrelevant text is another repeat's target, so that one reading of S serves both
          halves. The same statistic with less text-to-text noise along the curve, at about half the cost.
          With a text of its own for I, the irrelevant prefixes are read beside.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from farspan.corpus import Corpus, join
from farspan.lm import LM
from farspan.reader import Reader, Scores
from farspan.record import Row
from farspan.tasks import Example, Result, Work

AUTHORS_SEPARATOR = 1  # the authors' script writes id 1 for any model; its id 2 stands last, where nothing reads it


@dataclass(frozen=True)
class Curve:
    """The forgetting curve of one target text and one irrelevant text."""

    target: Corpus
    prefix: Corpus | None = None  # I; None: the protocol's own (another target, or the end of the text)
    protocol: Literal["paper", "nested"] = "nested"
    compat: bool = False  # the authors' separator

    name: ClassVar[str] = "curve"
    version: ClassVar[int] = 1

    @property
    def settings(self) -> dict[str, Any]:
        return {
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
        return 2 * (length + len(self.separator(lm)))

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example]:
        """The examples of all repeats. In `nested` the others' targets go round in a ring, so that both halves are
        measured on the same targets.

        Raises:
            ValueError: a text too short, or one repeat where another's target is needed.
        """
        separator = self.separator(lm)
        if self.protocol == "paper":
            return list(self._paper(lm, lengths, repeats, seed))
        if self.prefix is None:
            if repeats < 2:
                raise ValueError("one repeat has no other target to be its irrelevant text: use --repeats 2 or more")
            targets = self.target.windows(lengths[-1], repeats, seed)
            texts = [
                {"target": s, "other": targets[i - 1], "other_repeat": np.array((i - 1) % repeats)}
                for i, s in enumerate(targets)
            ]
        else:
            if self.prefix.hash == self.target.hash:  # one text: what stands in front must not be what is asked
                both = self.target.windows(lengths[-1], 2 * repeats, seed)
                targets, prefixes = both[:repeats], both[repeats:]
            else:
                targets = self.target.windows(lengths[-1], repeats, seed)
                prefixes = self.prefix.windows(lengths[-1], repeats, seed)
            texts = [{"target": s, "prefix": i} for s, i in zip(targets, prefixes, strict=True)]
        return [_example(self, seed, i, tuple(lengths), separator, **t) for i, t in enumerate(texts)]

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
        for length in example.lengths:
            yield Work(rows, separator + done, length - done, 0)
            yield Work(2, separator + length, separator + length - 1, math.ceil(length / 2))
            done = length

    def run(self, reader: Reader, batch: Sequence[Example]) -> Iterator[Result]:
        """Results of a batch of examples that share their lengths, shortest length first."""

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
        for length in batch[0].lengths:
            memory.read(read[:, done:length])
            done = length
            second = torch.cat([separator.expand(len(asked), -1), asked[:, :length]], 1)
            scores = memory.score(second, slice(second.shape[1] - math.ceil(length / 2), None))
            for index, example in enumerate(batch):
                values, failed = _judged(scores, index, index + len(batch))
                values["context"] = 2 * second.shape[1]
                # whose target the control asked for: what pairs the two halves
                values["control_repeat"] = int(example.tokens.get("other_repeat", np.array(example.repeat)))
                yield Result(
                    example,
                    length,
                    values,
                    status="nan" if failed else "ok",
                    reason=f"{failed} scored tokens have no finite log-probability" if failed else "",
                    num_seen=memory.num_seen,
                    num_kept=memory.num_kept,
                )


def unpacked(hits: str, scored: int) -> np.ndarray:
    """Hits per token as 0 and 1, in order, from how rows hold them: bits, first token first, as hexadecimal."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(hits), dtype=np.uint8), count=scored)


def read_authors_file(path: str | Path, model: str) -> list[Row]:
    """Rows of a result file of the authors' script: a list of {"length", "copy_accs", "lm_accs"}.

    Raises:
        ValueError: not such a file.
    """
    try:
        points = json.loads(Path(path).read_text("utf-8"))
        if not points:
            raise ValueError("it holds no lengths")
        if not all(0 <= value <= 1 for point in points for value in (*point["copy_accs"], *point["lm_accs"])):
            raise ValueError("an accuracy is not between 0 and 1")
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
                    "imported": Path(path).name,
                },
                length=int(point["length"]),
                repeat=repeat,
                seed=0,
                example=f"{Path(path).name}:{point['length']}:{repeat}",
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
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist") from error
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a result file of the forgetting curve's authors, a JSON list of objects with length, "
            f"copy_accs and lm_accs ({type(error).__name__}: {error})"
        ) from error


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
    digest = hashlib.sha256(f"{task.name} {task.version} {task.protocol} {separator} {seed} {repeat}".encode())
    for name, ids in sorted(tokens.items()):
        digest.update(name.encode() + np.asarray(ids, dtype=np.int64).tobytes())
    return Example(digest.hexdigest()[:16], repeat, lengths, tokens)
