"""Sums over predicted tokens, computed in blocks, so that the logits of all tokens are never held at once."""

from collections.abc import Callable
from functools import partial, reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from farspan.reader import logits_at_once

NOT_A_TARGET = -100  # the label of a position that is not predicted


def block_size(device: torch.device, vocabulary: int) -> int:
    """Return the number of tokens whose logits are held at once, at least 1."""
    return max(1, logits_at_once(device) // vocabulary)


def summed(of_block: Callable[..., Tensor], vocabulary: int, *rows: Tensor) -> Float[Tensor, "..."]:
    """Return the sum of `of_block(*block)` over blocks of `rows`, tensors with the same first dimension, tokens.

    If there are several blocks, each is computed again in the backward pass, so that only one is held at a time.
    """
    size = block_size(rows[0].device, vocabulary)
    if len(rows[0]) <= size:
        return of_block(*rows)
    again = partial(checkpoint, of_block, use_reentrant=False) if torch.is_grad_enabled() else of_block
    return reduce(torch.add, (again(*block) for block in zip(*(part.split(size) for part in rows), strict=True)))


def summed_nats(
    logits_of: Callable[[Tensor], Tensor],
    vocabulary: int,
    hidden: Float[Tensor, "tokens hidden"],
    labels: Int[Tensor, "tokens"],
) -> Float[Tensor, ""]:
    """Return the sum of -log p(label) in nats, in fp32; `logits_of` returns the logits of a block of hidden states."""

    def nats(block: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits_of(block).float(), targets, reduction="sum")

    return summed(nats, vocabulary, hidden, labels)
