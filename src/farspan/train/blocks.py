"""Sums over predicted tokens without ever holding all of their logits."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from farspan.reader import LOGITS_AT_ONCE, LOGITS_AT_ONCE_ELSEWHERE


def summed(of_block: Callable[..., Tensor], vocabulary: int, *rows: Tensor) -> Float[Tensor, "..."]:
    """The sum of `of_block(*block)` over blocks of `rows`, tensors of one first dimension, `tokens`.

    A block has as many tokens as there is room for their logits. Of several, each is computed again for its gradient.
    """
    limit = LOGITS_AT_ONCE.get(rows[0].device.type, LOGITS_AT_ONCE_ELSEWHERE)
    size, tokens = max(1, limit // vocabulary), len(rows[0])
    if tokens <= size:
        return of_block(*rows)
    total: Tensor | None = None
    for first in range(0, tokens, size):
        block = [part[first : first + size] for part in rows]
        again = torch.is_grad_enabled()
        value = checkpoint(of_block, *block, use_reentrant=False) if again else of_block(*block)
        total = value if total is None else total + value
    assert total is not None
    return total
