"""Readers whose forgetting curve is known: no model, no torch modules, just a rule for what is remembered."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan import hf
from farspan.lm import LM, Separator
from farspan.reader import Reader, Scores
from farspan.tasks.attention import SINKS, BoundAttention
from farspan.tasks.curve import BoundCurve
from farspan.tasks.perplexity import TARGET_TOKENS, BoundPerplexity
from farspan.text.corpora import Corpus

SEPARATOR = 0

Rule = Callable[[int, int, int], bool]  # (distance, position, text's first token) -> is this token recalled?


def copier(distance: int) -> Rule:
    """Recalls everything up to `distance` tokens back, nothing beyond."""
    return lambda back, position, text: back <= distance


def every(share: int) -> Rule:
    """Recalls every `share`-th token, however far back."""
    return lambda back, position, text: position % share == 0


def fading(half_life: int, noise: float) -> Rule:
    """Recalls all tokens to half of `half_life`, then fewer and fewer: half of them at `half_life`, none at one and a
    half. `noise` is the standard deviation by which texts differ."""

    def rule(back: int, position: int, text: int) -> bool:
        share = 1.5 - back / half_life + noise * float(np.random.default_rng(text).normal())
        return (position * 0.618034) % 1 < share

    return rule


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
        for i, row in enumerate(ids.tolist()):
            read = self.ids[i % len(self.ids)].tolist()
            text = read + row
            second = len(read) + row.index(SEPARATOR)
            first = len(read) - 1 - read[::-1].index(SEPARATOR)
            begin = text[second + 1]  # the second part may be a slice from further inside the first
            start = read.index(begin) if begin in read else first + 1
            back = second + 1 - start
            rows.append(
                [
                    int(not (t >= back and text[t] == text[t - back] and self.rule(back, t, read[first + 1])))
                    for t in range(len(read), len(text))
                ]
            )
        rank = torch.tensor(rows)[:, keep or slice(None)]
        return Scores(rank.float(), rank)


@dataclass
class ToyReader(Reader):
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

    def kept(self, num_tokens: int) -> int:
        return num_tokens

    @contextmanager
    def on(self, lm: Any) -> Iterator[ToyReader]:
        yield ToyReader(lm, self.rule)


class ToyLM(SimpleNamespace):
    @property
    def free_bytes(self) -> int:
        return hf.free_bytes(self.device)

    def key_bytes(self, num_tokens: int, chunk: int) -> int:
        return 0

    def flops(self, num_before: int, num_tokens: int, num_scored: int) -> float:
        return float(num_tokens)


def toy_lm(position_limit: int | None = None) -> Any:
    return ToyLM(
        name="toy",
        separator=Separator((SEPARATOR,), "bos"),
        num_parts=1,
        position_limit=position_limit,
        limit=f"the model has {position_limit} positions",
        has_weights=True,
        rows_at_once=None,
        trained_length=None,
        device=torch.device("cpu"),
        identity={"name": "toy"},
    )


def counting_text(num_documents: int = 12, length: int = 400) -> Corpus:
    """Documents in which no token ever comes twice, so that nothing can be guessed."""
    tokens = np.arange(1, num_documents * length + 1)
    return Corpus("counting", "counting", tokens, np.arange(num_documents + 1) * length)


def few_tokens(documents: int = 4, length: int = 150) -> Corpus:
    """Few different tokens, so that a model of random weights hits some of them."""
    tokens = np.random.default_rng(0).integers(1, 12, documents * length)
    return Corpus("few", "few", tokens, np.arange(documents + 1) * length)


def text_that_breaks(lm: LM) -> Corpus:
    """A text of one token, but for 75 tokens in its first document, which a model then has no finite embedding of."""
    text = few_tokens()
    tokens = np.full_like(text.tokens, 5)
    tokens[:75] = 7
    lm.model.get_input_embeddings().weight.data[7] = torch.nan
    return Corpus("rare", "rare", tokens, text.starts)


def curve_of(target: Corpus, prefix: Corpus | None = None, protocol: str = "nested", **options: Any) -> BoundCurve:
    """The forgetting curve of texts that are there; the tokens of a probe matter only to that protocol."""
    if protocol != "probe":
        options = {key: value for key, value in options.items() if key not in ("warmup", "scored")}
    return BoundCurve(target=target, prefix=prefix, protocol=protocol, **options)


def perplexity_of(
    text: Corpus, targets: str = "fixed", target_tokens: int = TARGET_TOKENS, buckets: int | None = None
) -> BoundPerplexity:
    """Perplexity of a text that is there; the number of targets has no meaning where all tokens are scored."""
    target_tokens = TARGET_TOKENS if targets == "all" else target_tokens
    return BoundPerplexity(text=text, targets=targets, target_tokens=target_tokens, buckets=buckets)


def attention_of(text: Corpus, bin: int, sinks: int = SINKS, **options: Any) -> BoundAttention:
    """Attention statistics of a text that is there."""
    return BoundAttention(text=text, bin=bin, sinks=sinks, **options)
