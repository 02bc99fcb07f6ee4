"""Slow twins: what the clever paths must equal, written as plainly as possible."""

import math
from typing import Any

import torch
from torch import Tensor


def naive_half(
    model: Any,
    separator: tuple[int, ...],
    first: list[int],
    target: list[int],
    end: tuple[int, ...] = (),
    scored: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One half of the forgetting curve as the authors' script does it: one forward over everything, all logits.

    Returns for the last `scored` tokens of the target, by default ceil(L/2): hits by argmax, nats, and how far the
    two largest logits are apart (a hit within rounding of a tie says nothing).
    """
    ids = [*separator, *first, *separator, *target, *end]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    begin = 2 * len(separator) + len(first)
    scored = scored or math.ceil(len(target) / 2)
    positions = range(begin + len(target) - scored, begin + len(target))
    hits, nats, margins = [], [], []
    for position in positions:
        expected = logits[position - 1]
        best = expected.topk(2).values
        hits.append(int(expected.argmax()) == ids[position])
        nats.append(float(-expected.log_softmax(-1)[ids[position]]))
        margins.append(float(best[0] - best[1]))
    return torch.tensor(hits), torch.tensor(nats), torch.tensor(margins)


def naive_greedy(model: Any, ids: Tensor, max_new_tokens: int) -> Tensor:
    """The likeliest tokens after ids, each from one forward over everything so far."""
    text = ids
    with torch.no_grad():
        for _ in range(max_new_tokens):
            best = model(input_ids=text, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            text = torch.cat([text, best], 1)
    return text[:, ids.shape[1] :]
