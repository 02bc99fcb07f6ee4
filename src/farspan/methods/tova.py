"""TOVA: the keys that the last token attends to most, the same ones for all heads of a layer.

    votes(j) = mean over the query heads of a layer of softmax_j(q_n · k_j),  n: the last token of the text
    kept     = the last key, and the others with the largest votes

Oren et al. 2024, arXiv 2401.06104. The paper drops the key with the smallest weight at every token, once
the budget is full; ours chooses once, when the text has been read, to be comparable with other evictions. Keys keep
their positions in the text. For equal votes, the earliest keys are kept. A layer with its own sliding window chooses
among the keys that it still holds.

Holds every key while it reads, then the budget per head and layer. A `read` after a question reads the text again. Not
trained.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from farspan.hf import refuse_divided
from farspan.hf.attend import Call
from farspan.lm import LM
from farspan.methods.budget import Budget
from farspan.reader import Reader


@dataclass(frozen=True)
class Tova(Budget):
    """The keys of each layer that the last token of the text attends to most."""

    name: ClassVar[str] = "tova"

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        refuse_divided(lm.model, str(self))
        return super().on(lm)

    def votes(self, call: Call) -> Float[Tensor, "batch heads keys"]:
        keys = call.key.shape[2]
        scores = call.scores(call.query, call.key).masked_fill_(call.hidden(slice(0, 1), slice(0, keys)), -torch.inf)
        votes = scores.softmax(-1, dtype=torch.float32).mean((1, 2))  # [batch, one query, keys]
        votes[..., -1] = torch.inf
        return votes.expand(-1, call.key.shape[1], -1)
