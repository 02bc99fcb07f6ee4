"""Methods that keep a budget of keys after a text has been read: a number of keys, or a share of the text."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from farspan.hf.attend import Call, Eviction
from farspan.hf.remap import in_place
from farspan.lm import LM
from farspan.methods.base import ATTENTION, Method
from farspan.reader import Reader, attending
from farspan.specs import limited


@dataclass(frozen=True)
class Evicting(Method, Eviction):
    """The base of methods that read with full attention, and then keep the keys that they choose."""

    changes: ClassVar[tuple[str, ...]] = (ATTENTION,)
    in_model: ClassVar[bool] = False
    scores_as_it_reads: ClassVar[bool] = False

    @property
    def sees(self) -> int:
        return self.window

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        return attending(lm, in_place, name=str(self), rotary=False, eviction=self, padding=True)


@dataclass(frozen=True)
class Budget(Evicting):
    """The base of methods that read with full attention and then keep the keys with the largest `votes`."""

    capacity: int | None = limited(None, 1)  # keys per head
    share: float | None = None  # of the tokens of the text, rounded up; instead of capacity

    window: ClassVar[int] = 1  # last queries that the choice needs

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.capacity is None) == (self.share is None):
            raise ValueError(
                f"{self.name} needs one budget of keys: write {self.name}:capacity=KEYS, or {self.name}:share=0.25 of "
                "the text"
            )
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise ValueError(f"{self}: share must be above 0 and at most 1")

    def kept_to_answer(self, num_tokens: int) -> int:
        # rounded first: 0.07 * 100 is slightly above 7 in floating point
        wanted = self.capacity if self.share is None else math.ceil(round(self.share * num_tokens, 9))
        assert wanted is not None
        return min(num_tokens, wanted)

    def small(self, num_tokens: int) -> "Budget":
        if self.share is not None:
            return replace(self, share=min(self.share, 0.2))
        return replace(self, capacity=min(self.kept_to_answer(num_tokens), num_tokens // 5))

    def neutral(self, num_tokens: int) -> "Budget":
        if self.share is not None:
            return replace(self, share=1.0)
        return replace(self, capacity=max(self.capacity or 0, num_tokens))

    def votes(self, call: Call) -> Float[Tensor, "batch heads keys"]:
        """Return the vote of each head for keeping each key. `call` is as in `Eviction.choose`."""
        raise NotImplementedError

    def choose(self, call: Call) -> Int[Tensor, "batch heads chosen"] | None:
        count = self.kept_to_answer(call.start + call.query.shape[3])
        return None if call.key.shape[2] <= count else largest_votes(self.votes(call), count)


def largest_votes(votes: Float[Tensor, "batch heads keys"], count: int) -> Int[Tensor, "batch heads count"]:
    """Return the indices of the `count` largest votes of each head, ascending; for equal votes, the earliest."""
    return votes.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values
