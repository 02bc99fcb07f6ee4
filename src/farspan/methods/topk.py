"""Top-k attention: each query attends to the k keys with the largest scores, separately in each head.

    visible(i) = the k largest of {q_i · k_j : j <= i}

As in SMT (appendix B.3, figure 5), at inference. Exactly k keys; for equal scores, the earliest. Scores are computed in
blocks of queries, never [time, time]. Shows how few tokens a query needs; it does not make reading cheaper, and keeps
every key. Not trained.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from farspan.hf.attend import dense
from farspan.lm import LM
from farspan.methods.base import ATTENTION, Method
from farspan.reader import Reader, attending
from farspan.specs import limited


@dataclass(frozen=True)
class TopK(Method):
    """The `k` largest scores of each query and head."""

    k: int = limited(least=1)  # keys, the current one among them only if it is one of the largest

    name: ClassVar[str] = "topk"
    changes: ClassVar[tuple[str, ...]] = (ATTENTION,)

    def small(self, num_tokens: int) -> "TopK":
        return replace(self, k=min(self.k, num_tokens // 16))

    def neutral(self, num_tokens: int) -> "TopK":
        return replace(self, k=max(self.k, num_tokens))

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        attend = partial(dense, select=partial(largest, k=self.k))
        return attending(lm, attend, name=str(self), rotary=False, padding=True)


def largest(scores: Float[Tensor, "*rows keys"], k: int) -> Float[Tensor, "*rows keys"]:
    """Set all scores but the k largest of each row to -inf, in place, and return them."""
    keys = scores.shape[-1]
    if k >= keys:
        return scores
    smallest = kth_largest(scores, k)
    fewer = scores < smallest
    # elsewhere the host would wait for the device, in every block of every layer
    if scores.device.type == "cpu" and int(fewer.sum()) == fewer.numel() // keys * (keys - k):
        return scores.masked_fill_(fewer, -torch.inf)
    equal = scores == smallest  # ties for the last places
    places = k - (scores > smallest).sum(-1, keepdim=True)
    return scores.masked_fill_(fewer | (equal & (equal.cumsum(-1) > places)), -torch.inf)


def kth_largest(scores: Float[Tensor, "*rows keys"], k: int) -> Float[Tensor, "*rows one"]:
    if scores.device.type == "cpu" and scores.dtype == torch.float32 and not scores.requires_grad:
        place = scores.shape[-1] - k  # numpy selects with vector instructions, twice as fast as torch
        return torch.from_numpy(np.partition(scores.numpy(), place, axis=-1)[..., place, None])
    return scores.topk(k, sorted=False).values.amin(-1, keepdim=True)
