"""Readers whose forgetting curve is known: no model, no torch modules, just a rule for what is remembered."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan.corpus import Corpus
from farspan.lm import Separator
from farspan.reader import Scores

SEPARATOR = 0

Rule = Callable[[int, int], bool]  # (distance, position) -> is this token recalled?


def copier(distance: int) -> Rule:
    """Recalls everything up to `distance` tokens back, nothing beyond."""
    return lambda back, position: back <= distance


def every(share: int) -> Rule:
    """Recalls every `share`-th token, however far back."""
    return lambda back, position: position % share == 0


@dataclass
class ToyMemory:
    rule: Rule
    ids: Tensor | None = None

    @property
    def num_seen(self) -> int:
        return 0 if self.ids is None else self.ids.shape[1]

    num_kept = num_seen

    def read(self, ids: Tensor) -> None:
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)

    def score(self, ids: Tensor, keep: slice | None = None) -> Scores:
        assert self.ids is not None
        rows = []
        for i, row in enumerate(ids):
            text = torch.cat([self.ids[i % len(self.ids)], row])
            second = self.num_seen + int((row == SEPARATOR).nonzero()[0])
            first = int((text[:second] == SEPARATOR).nonzero()[-1])
            back = second - first
            rows.append(
                [
                    int(not (t >= back and text[t] == text[t - back] and self.rule(back, t)))
                    for t in range(self.num_seen, len(text))
                ]
            )
        rank = torch.tensor(rows)[:, keep or slice(None)]
        return Scores(rank.float(), rank)


@dataclass
class ToyReader:
    lm: Any
    rule: Rule
    chunk: int = 1024
    capacity: int = 0

    def read(self, *passages: Tensor, head: Tensor | None = None, weights: Tensor | None = None) -> ToyMemory:
        memory = ToyMemory(self.rule)
        for passage in passages:
            memory.read(passage)
        return memory


@dataclass(frozen=True)
class ToyMethod:
    rule: Rule

    def __str__(self) -> str:
        return "toy"

    @contextmanager
    def on(self, lm: Any) -> Iterator[ToyReader]:
        yield ToyReader(lm, self.rule)


def toy_lm(position_limit: int | None = None) -> Any:
    return SimpleNamespace(
        name="toy",
        separator=Separator((SEPARATOR,), "bos"),
        position_limit=position_limit,
        trained_length=None,
        device=torch.device("cpu"),
        identity={"name": "toy"},
    )


def counting_text(num_documents: int = 12, length: int = 400) -> Corpus:
    """Documents in which no token ever comes twice, so that nothing can be guessed."""
    tokens = np.arange(1, num_documents * length + 1)
    return Corpus("counting", "counting", tokens, np.arange(num_documents + 1) * length)
