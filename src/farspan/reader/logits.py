"""From logits to the scores of given tokens, and to the choice of new ones."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from farspan import hf
from farspan.hf.chunks import logits_at_once
from farspan.lm import LM

Head = Callable[[slice], Tensor]  # positions -> their logits [batch, positions, vocabulary] in float32

LOWEST_TEMPERATURE = 1e-3  # logits divided by much less overflow in float32


@dataclass
class Scores:
    """The model's scores of tokens, each given the memory and the tokens before it."""

    nats: Float[Tensor, "batch kept"]  # -log p(token); NaN at padding, and if the model gave none
    rank: Int[Tensor, "batch kept"]  # 0 = the greedy choice (of equal largest logits, the smallest id); otherwise the


class NotFiniteError(ValueError):
    """A model gave logits from which no token can be chosen."""


def head_of(lm: LM, hidden: Tensor, output: object) -> Head:
    """Return a function that computes the logits of these hidden states [batch, time, hidden] at given positions."""
    return lambda positions: hf.logits(lm.model, hidden[:, positions], output).float()


def scored(lm: LM, targets: Tensor, head: Head) -> Iterator[Scores]:
    """Yield the scores of targets [batch, time], in blocks of positions."""
    block = max(1, logits_at_once(lm) // (targets.shape[0] * lm.vocabulary))
    for first in range(0, targets.shape[1], block):
        logits = head(slice(first, first + block))
        target = targets[:, first : first + block].to(logits.device)
        of_target = logits.gather(-1, target.clamp_min(0)[..., None])
        nats = (logits.logsumexp(-1) - of_target[..., 0]).masked_fill(target < 0, torch.nan)
        rank = (logits > of_target).sum(-1)
        # logits rounded to 16 bits tie; greedy decoding takes the first of the largest, and so does a hit
        rank = torch.where((rank == 0) & (logits.argmax(-1) != target), 1, rank)
        yield Scores(nats, rank.masked_fill(nats.isnan(), -1))


def joined(parts: list[Scores], ids: Tensor) -> Scores:
    """Return the scores of parts as one; `ids` [batch, time]: whose they are."""
    if not parts:
        return Scores(torch.empty(ids.shape[0], 0, device=ids.device), ids.new_empty(ids.shape[0], 0))
    return Scores(torch.cat([p.nats for p in parts], 1), torch.cat([p.rank for p in parts], 1))


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise ValueError unless tokens can be sampled with these values."""
    if not (temperature == 0.0 or LOWEST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(
            f"temperature {temperature:g} cannot be sampled with: got {temperature:g}, expected 0 (the likeliest "
            f"token) or {LOWEST_TEMPERATURE:g} and more"
        )
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p {top_p:g} is no share of the probability: got {top_p:g}, expected above 0, at most 1")


def next_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Return a token [batch] of logits [batch, vocabulary]: the likeliest at temperature 0, else a sampled one."""
    if temperature == 0.0:
        return logits.argmax(-1)
    probabilities, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    picked = torch.multinomial(probabilities.masked_fill(outside, 0.0), 1, generator=generator)
    return order.gather(-1, picked)[:, 0]
