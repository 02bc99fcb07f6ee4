"""Adaptive parallel encoding against its equation, pair by pair; passages, pieces, refusals."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.hf import attend
from farspan.lm import LM
from farspan.methods import ape, method
from farspan.reader import dense_reader

from naive import by_pairs
from tiny import nats_of, open_lm, same, some_ids

FIVE = ["llama", "qwen3", "gemma3", "gpt_neox", "mistral"]
HEAD, PASSAGES = 3, (9, 14, 1, 11)  # tokens
TIME = HEAD + sum(PASSAGES) + 20


class Naive:
    """The rules of the method for one text of a prefix, passages of these lengths, and later tokens."""

    def __init__(self, head: int, passages: tuple[int, ...], temperature: float, scale: float) -> None:
        self.head, self.temperature, self.scale = head, temperature, scale
        self.starts = [head + sum(passages[:n]) for n in range(len(passages) + 1)]
        self.longest = max(passages)

    def passage(self, i: int) -> int | None:
        """The number of the passage that token i is in; None: the prefix, or a later token."""
        return next((n for n, (a, b) in enumerate(pairwise(self.starts)) if a <= i < b), None)

    def position(self, i: int) -> int:
        if (n := self.passage(i)) is not None:
            return self.head + i - self.starts[n]
        return i if i < self.head else self.head + self.longest + i - self.starts[-1]

    def parts(self, i: int, j: int) -> tuple[int, int]:
        return self.position(i), self.position(j)

    def visible(self, i: int, j: int) -> bool:
        return i >= self.starts[-1] or j < self.head or self.passage(i) == self.passage(j)

    def weights(self, i: int, seen: list[int], scores: Tensor) -> Tensor:
        context = torch.tensor([i >= self.starts[-1] and self.passage(j) is not None for j in seen])
        weights = torch.zeros_like(scores)
        for head, row in enumerate(scores.tolist()):
            sums = [0.0, 0.0]  # of exponentials: of the rest, of the context
            for j, score in enumerate(row):
                sums[int(context[j])] += math.exp(score / self.temperature if context[j] else score)
            total = sums[0] + (sums[1] ** self.scale if sums[1] else 0.0)  # exp of the log-sum-exp times the scale
            for j, score in enumerate(row):
                if context[j]:
                    weights[head, j] = math.exp(score / self.temperature) / sums[1] * sums[1] ** self.scale / total
                else:
                    weights[head, j] = math.exp(score) / total
        return weights

    def nats(self, lm: LM, ids: Tensor) -> Tensor:
        """Nats of the tokens after the first later one."""
        logits = by_pairs(lm.model, ids, parts=self.parts, visible=self.visible, weights=self.weights)
        return nats_of(logits, ids[0])[self.starts[-1] :]


def given(text: str, lm: LM, ids: Tensor, head: int, passages: tuple[int, ...], chunk: int, read: int = 5) -> Tensor:
    """Nats of the tokens after the first later one, of which `read` are read and the others scored."""
    begin, *parts, later = ids.split([head, *passages, ids.shape[1] - head - sum(passages)], 1)
    with method(text).on(lm) as reader:
        reader.chunk = chunk
        memory = reader.read(*parts, head=begin)
        assert memory.num_seen == memory.num_kept == head + sum(passages)
        scores = [memory.score(later[:, : 1 + read]).nats]
        memory.read(later[:, : 1 + read])
        return torch.cat([*scores, memory.score(later[:, 1 + read :]).nats], 1)[:, 1:]


@pytest.mark.parametrize("architecture", FIVE)
@pytest.mark.parametrize(("temperature", "scale"), [(0.9, 0.9), (0.5, 1.3), (1, 1)])
def test_every_pair_is_weighted_as_in_the_equation(
    temperature: float, scale: float, architecture: str, tokenizer: Any
) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, TIME)
    expected = Naive(HEAD, PASSAGES, temperature, scale).nats(lm, ids)
    for chunk in (4, 1024):
        text = f"ape:temperature={temperature},scale={scale}"
        same(given(text, lm, ids, HEAD, PASSAGES, chunk)[0], expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_pieces_are_passages_cut_from_the_end(architecture: str, tokenizer: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 45)
    same(given("ape:piece=8", lm, ids, 2, (27,), 1024)[0], given("ape", lm, ids, 2, (3, 8, 8, 8), 5)[0])


@pytest.mark.parametrize("architecture", FIVE)
def test_one_passage_at_temperature_and_scale_of_one_is_full_attention(architecture: str, tokenizer: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(2, 60)
    full = dense_reader(lm).read(ids[:, :35]).score(ids[:, 35:]).nats[:, 1:]
    same(given("ape:temperature=1,scale=1", lm, ids, 3, (32,), 7), full)
    assert (given("ape", lm, ids, 3, (32,), 7) - full).abs().max() > 0.01


def test_without_passages_it_is_full_attention(lm: LM) -> None:
    ids = some_ids(2, 40)
    expected = dense_reader(lm).read(ids[:, :20]).score(ids[:, 20:]).nats
    with method("ape").on(lm) as reader:
        memory = reader.read(head=ids[:, :10])
        memory.read(ids[:, 10:20])
        same(memory.score(ids[:, 20:]).nats, expected)


def test_the_order_of_the_passages_changes_nothing_after_a_question(lm: LM) -> None:
    ids = some_ids(1, 60)
    head, one, other, later = ids.split([3, 12, 20, 25], 1)
    with method("ape").on(lm) as reader:
        scores = []
        for parts in ((one, other), (other, one)):
            memory = reader.read(*parts, head=head)
            memory.read(later[:, :4])
            scores.append(memory.score(later[:, 4:]).nats)
    same(*scores)


def test_the_kernel_and_the_plain_scores_give_the_same(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(2, 130)
    expected = given("ape", lm, ids, 5, (30, 40), 1024)
    monkeypatch.setattr(ape, "FUSED_QUERIES", 16)
    same(given("ape", lm, ids, 5, (30, 40), 1024), expected)
    monkeypatch.setattr(ape, "takes", lambda *tensors: False)
    monkeypatch.setitem(attend.SCORES_AT_ONCE, "cpu", 4 * 32 * 130)
    same(given("ape", lm, ids, 5, (30, 40), 1024), expected)


def test_passages_longer_together_than_the_positions_are_read(tokenizer: Any) -> None:
    lm, ids = open_lm("gpt2", tokenizer, n_positions=64), some_ids(1, 130)
    with method("ape").on(lm) as reader:
        reader.read(*ids[:, :100].split(50, 1), head=ids[:, :4]).score(ids[:, :11])  # 4 + 50 + 10, the last not fed
        with pytest.raises(ValueError, match=r"64 positions; 65 tokens do not fit"):
            reader.read(*ids[:, :100].split(50, 1), head=ids[:, :4]).score(ids[:, :12])


def test_it_goes_together_with_rope(lm: LM) -> None:
    ids, own = some_ids(1, TIME), lm.model.model.rotary_emb.inv_freq
    rules = Naive(HEAD, PASSAGES, 0.9, 0.9)
    logits = by_pairs(lm.model, ids, parts=rules.parts, visible=rules.visible, weights=rules.weights, inv_freq=own / 2)
    expected = nats_of(logits, ids[0])[rules.starts[-1] :]
    same(given("rope:type=linear,factor=2+ape", lm, ids, HEAD, PASSAGES, 9)[0], expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ape:temperature=0", "temperature and scale must be above 0 and finite"),
        ("ape:scale=-1", "temperature and scale must be above 0 and finite"),
        ("ape:scale=inf", "temperature and scale must be above 0 and finite"),
        ("ape:piece=0", "ape: piece: got 0, expected at least 1"),
        ("ape+replug:piece=4", "both change how passages works"),
        ("ape+dca", "both change how attention works"),
        ("ape+sinks:window=9", "both change how attention works"),
        ("ape+temperature", "both change how temperature works"),
        ("rope:type=dynamic+ape", "both change how attention works"),
    ],
)
def test_settings_and_compositions_that_mean_nothing_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        method(text)


def test_a_model_without_positions_is_refused(tokenizer: Any) -> None:
    lm = open_lm("mamba2", tokenizer)
    with pytest.raises(ValueError, match="takes no positions; use full"), method("ape").on(lm):
        pass
