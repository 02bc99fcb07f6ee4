"""Compute scores of given tokens from logits, and choose new tokens."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from farspan import hf
from farspan.hf.chunks import logits_at_once
from farspan.lm import LM

Head = Callable[[slice], Tensor]  # positions -> their logits [batch, positions, vocabulary] in the head's dtype

VALUES_AT_ONCE = {"cpu": 1 << 18}  # logits of one pass of `_scores`: as many as fit into a CPU's cache
VALUES_AT_ONCE_ELSEWHERE = 1 << 23

LOWEST_TEMPERATURE = 1e-3  # logits divided by a much smaller number overflow in float32


@dataclass
class Scores:
    """The model's scores of tokens, each given the memory and the tokens before it."""

    nats: Float[Tensor, "batch kept"]  # -log p(token); NaN at padding, and if the model or its server gave none
    # 0: the greedy choice (of equal largest logits, the smallest id); otherwise the number of larger logits, but at
    # least 1; -1 at padding, and if the model gave numbers that are not finite
    rank: Int[Tensor, "batch kept"]

    @property
    def failed(self) -> Bool[Tensor, "batch kept"]:
        """Where the model gave no finite number. A server that returns only its choice gives ranks without nats."""
        return ~self.nats.isfinite() & ~(self.nats.isnan() & (self.rank >= 0))


@dataclass(frozen=True)
class Sampling:
    """How new tokens are chosen."""

    max_new_tokens: int
    min_new_tokens: int = 0
    stop: Sequence[int] = ()
    seed: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def named(self) -> dict[str, Any]:
        """The settings that have the same names in all engines."""
        seed = {} if self.seed is None else {"seed": self.seed}
        top_p = {"top_p": self.top_p} if self.temperature else {}  # TGI refuses 1.0
        return {"temperature": self.temperature, **top_p, **seed}


class NotFiniteError(ValueError):
    """A model gave logits from which no token can be chosen."""


def head_of(lm: LM, hidden: Tensor, output: object) -> Head:
    """Return a function that computes the logits of these hidden states [batch, time, hidden] at given positions."""

    def head(positions: slice) -> Tensor:
        # cloned: torch multiplies slices of a batch one by one, each with a transposed copy of a frozen matrix
        return hf.logits(lm.model, hidden[:, positions].clone(memory_format=torch.contiguous_format), output)

    return head


def scored(lm: LM, targets: Tensor, head: Head) -> Iterator[Scores]:
    """Yield the scores of targets [batch, time], in blocks of positions."""
    batch, time = targets.shape
    # twice as many as elsewhere: each value is held once, and a block reads the whole output matrix
    most = max(1, 2 * logits_at_once(lm.device) // (batch * lm.vocabulary))
    # blocks of equal size: a small last one costs nearly as much
    block = math.ceil(time / math.ceil(time / most)) if time else 1
    for first in range(0, time, block):
        logits = head(slice(first, first + block))
        target = targets[:, first : first + block].to(logits.device)
        rows = VALUES_AT_ONCE.get(logits.device.type, VALUES_AT_ONCE_ELSEWHERE) // logits.shape[-1]
        few = (part.split(max(1, rows)) for part in (logits.flatten(0, 1), target.flatten()))
        nats, rank = zip(*(_scores(*part) for part in zip(*few, strict=True)), strict=True)
        yield Scores(torch.cat(nats).view_as(target), torch.cat(rank).view_as(target))


def _scores(logits: Float[Tensor, "rows vocabulary"], target: Int[Tensor, "rows"]) -> tuple[Tensor, Tensor]:
    """Return nats and ranks of targets."""
    logits = logits.float()
    of_target = logits.gather(-1, target.clamp_min(0)[:, None])
    nats = (logits.logsumexp(-1, keepdim=True) - of_target)[:, 0].masked_fill(target < 0, torch.nan)
    largest = of_target == logits.amax(-1, keepdim=True)
    # if the target has the largest logit, equal logits are counted as well, including its own
    above = of_target.nextafter(of_target.new_tensor(-torch.inf)).where(largest, of_target)
    # float32 is summed several times faster than booleans
    rank = torch.gt(logits, above, out=torch.empty_like(logits)).sum(-1).long() - largest[:, 0].long()
    # logits rounded to 16 bits tie; greedy decoding takes the first of the largest, and only that one has rank 0
    tied = largest[:, 0] & (rank > 0)
    if logits.device.type != "cpu":  # of all rows: to learn whether there are any, the host would wait for the device
        rank = (logits.argmax(-1) != target).long().where(tied, rank)
    elif bool(tied.any()):
        rank[tied] = (logits[tied].argmax(-1) != target[tied]).long()
    return nats, rank.masked_fill(nats.isnan(), -1)


def joined(parts: list[Scores], ids: Tensor) -> Scores:
    """Concatenate the scores of parts; `ids` [batch, time]: the scored tokens."""
    if not parts:
        return Scores(torch.empty(ids.shape[0], 0, device=ids.device), ids.new_empty(ids.shape[0], 0))
    return Scores(torch.cat([p.nats for p in parts], 1), torch.cat([p.rank for p in parts], 1))


def check_sampling(temperature: float, top_p: float, seed: int | None = None) -> None:
    """Raise ValueError unless tokens can be sampled with these values."""
    if not (temperature == 0.0 or LOWEST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(
            f"temperature: got {temperature:g}, expected 0 (the likeliest token) or a finite number from "
            f"{LOWEST_TEMPERATURE:g} on"
        )
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: got {top_p:g}, expected a share of the probability, above 0 and at most 1")
    if seed is not None and not -(2**63) <= seed < 2**64:  # what torch takes
        raise ValueError(f"seed: got {seed}, expected a number from -2**63 to 2**64 - 1. Give a smaller one")


def next_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Return a token [batch] of logits [batch, vocabulary]: the likeliest at temperature 0, else a sampled one."""
    if temperature == 0.0:
        return logits.argmax(-1)
    probabilities, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    picked = torch.multinomial(probabilities.masked_fill(outside, 0.0), 1, generator=generator)
    return order.gather(-1, picked)[:, 0]
