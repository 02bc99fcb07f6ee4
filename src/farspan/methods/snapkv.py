"""SnapKV: the keys that the end of the text attends to, chosen once for each head.

    votes(j)  = mean over the query heads of a key head of Σ_i softmax_j(q_i · k_j),  i in the last `window` queries
    kept      = the last `window` keys, and the `capacity` - `window` others with the largest pool(votes)

Li et al. 2024, arXiv 2404.14469, section 4.1 and listing 1. The pool (largest or mean of `kernel` neighbouring votes)
keeps runs of keys together. The defaults are those of the authors' LongBench runs: a window of 32, the largest of 7
votes. Keys keep their positions in the text. The authors copy the keys for every query head; ours keeps the key heads
of the model, and averages votes over the query heads that share one before the pool. For equal votes, the earliest keys
are kept. A layer with its own sliding window chooses among the keys that it still holds.

The text is read with full attention, in any chunks, and the choice is made at the first call of `score` or `generate`.
The tokens of the call see the chosen keys and each other. A question votes only if it was read before, as in
the paper: `icl`, `qa`, `ralm` and tasks on documents read it; `needle`, `passkey` and `own` give it in the call of the
answer, where it does not vote. Holds every key while it reads, then `capacity` per head and layer. A
`read` after that reads the text again. Not trained.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from farspan.hf.attend import Call
from farspan.methods.budget import Evicting, largest_votes
from farspan.specs import choice, limited

POOLS = ("max", "mean")


@dataclass(frozen=True)
class SnapKV(Evicting):
    """The `capacity` keys of each head that the last `window` queries of the text attend to most."""

    capacity: int  # keys per head, the window among them
    window: int = limited(32, 1)  # tokens at the end of the text, which are kept and vote
    kernel: int = limited(7, 1, quiet=True)  # neighbouring keys whose votes are pooled, odd
    pool: str = choice(POOLS, "max", quiet=True)

    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity <= self.window:
            raise ValueError(f"{self}: expected a capacity larger than the window")
        if self.kernel % 2 == 0:
            raise ValueError(f"{self}: kernel must be odd; 1 pools nothing")

    def kept_to_answer(self, num_tokens: int) -> int:
        return min(num_tokens, self.capacity)

    def small(self, num_tokens: int) -> "SnapKV":
        return replace(self, capacity=min(self.capacity, num_tokens // 5), window=min(self.window, num_tokens // 16))

    def neutral(self, num_tokens: int) -> "SnapKV":
        return replace(self, capacity=max(self.capacity, num_tokens))

    def choose(self, call: Call) -> Int[Tensor, "batch heads chosen"] | None:
        keys = call.key.shape[2]
        if keys <= self.capacity:
            return None
        votes = call.key.new_zeros(*call.key.shape[:2], keys, dtype=torch.float32)
        for block in call.blocks(lambda size: keys):
            scores = call.scores(call.query[..., block, :], call.key)
            scores = scores.masked_fill_(call.hidden(block, slice(0, keys)), -torch.inf)
            votes += scores.softmax(-1, dtype=torch.float32).sum(-2).mean(2)
        before = votes[..., : keys - self.window]
        pooled = (max_pool1d if self.pool == "max" else avg_pool1d)(before, self.kernel, 1, self.kernel // 2)
        best = largest_votes(pooled, self.capacity - self.window)
        last = torch.arange(keys - self.window, keys, device=best.device).expand(*best.shape[:2], -1)
        return torch.cat([best, last], -1)
