"""Knorm: the keys of the smallest norm, chosen for each head without any attention weights.

    votes(j) = -|k_j|

Devoto et al. 2024, arXiv 2406.11430: keys of a small norm get much attention whatever the query, the first
tokens above all. RoPE changes no norm. The paper leaves out the first two layers; ours treats all alike, as other
evictions do. Keys keep their positions in the text. A layer with its own sliding window chooses among the keys that it
still holds. If norms agree to a thousandth, the earliest keys are kept: in the first layer all copies of a token have
the same norm, and rounding must not choose among them.

Holds every key while it reads, then the budget per head and layer. A `read` after a question reads the text again. Not
trained.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from farspan.hf.attend import Call
from farspan.methods.budget import Budget

STEPS = 1024  # steps between a norm and its double; norms in one step count as equal


@dataclass(frozen=True)
class Knorm(Budget):
    """The keys of each head that have the smallest norm."""

    name: ClassVar[str] = "knorm"

    def votes(self, call: Call) -> Float[Tensor, "batch heads keys"]:
        norms = torch.linalg.vector_norm(call.key, dim=-1, dtype=torch.float32)
        return -(STEPS * norms.log2()).round()
