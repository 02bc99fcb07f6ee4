"""Self-Extend: exact positions within a neighbour window, positions floored to groups beyond it.

    distance(i, j) = i - j                                          for i - j < window
                     ⌊i / group⌋ + window - ⌊window / group⌋ - ⌊j / group⌋    otherwise

Jin et al. 2024, arXiv 2401.01325, algorithm 1; one softmax covers both. A window counts the current
token. Up to (trained - window) · group + window tokens, all distances are within the trained length; a longer text is
refused. A layer's own sliding window still applies.

Keys are held as the model rotated them, and those beyond the window are rotated again for every chunk of queries. While
single tokens are generated, the rotated ones are kept: half as much memory again. Keeps every key. Not trained.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from farspan.hf.attend import Call, Position
from farspan.hf.remap import Piece, remapped
from farspan.lm import LM
from farspan.methods.base import ATTENTION, Method
from farspan.reader import Reader, attending
from farspan.specs import limited


@dataclass(frozen=True)
class SelfExtend(Method):
    """The last `window` tokens at their distances, earlier ones in groups of `group`."""

    group: int = limited(least=1)  # tokens that share a position
    window: int | None = limited(None, 1)  # tokens, the current one included; default: half the trained length

    name: ClassVar[str] = "selfextend"
    changes: ClassVar[tuple[str, ...]] = (ATTENTION,)

    def kept_twice(self, num_tokens: int) -> int:
        return max(0, num_tokens - (self.window or 0))

    def small(self, num_tokens: int) -> "SelfExtend":
        window = min(self.window or num_tokens, num_tokens // 5)
        return replace(self, group=max(self.group, 2), window=window)

    def neutral(self, num_tokens: int) -> "SelfExtend":
        return replace(self, window=max(self.window or num_tokens, num_tokens))

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        trained = lm.trained_length
        if (window := self.window or (trained and max(1, trained // 2))) is None:
            raise ValueError(f"{self}: the config of {lm.name} has no trained length. Write window=TOKENS")
        if trained is not None and window > trained:
            raise ValueError(
                f"{self}: window = {window:,} tokens is more than the {trained:,} that {lm.name} was trained on; "
                f"use window <= {trained:,}"
            )
        remap = Grouped(self.group, window)

        def attend(call: Call) -> Tensor:
            end = call.start + call.query.shape[3]
            if trained is not None and remap.largest_distance(end - 1) >= trained:
                covered = (trained - window) * self.group + window
                fix = (
                    f"use group >= {needed_group(end, window, trained)}" if window < trained else "use a smaller window"
                )
                raise ValueError(
                    f"{self} covers {covered:,} tokens with the {trained:,} that {lm.name} was trained on, and not "
                    f"{end:,}; {fix}"
                )
            return remapped(call, remap)

        return attending(lm, attend, name=str(self))


@dataclass(frozen=True)
class Grouped:
    """The positions of Self-Extend."""

    group: int
    window: int

    @property
    def block(self) -> int:
        return max(64, self.window // 2)  # larger ones compute many pairs that are hidden on either side of the window

    def key(self, position: Int[Tensor, "keys"]) -> Int[Tensor, "keys"]:
        return position // self.group

    def pieces(self, here: range) -> list[Piece]:
        near = Piece(max(0, here.start - self.window + 1), here.stop, farthest=self.window)
        if here.stop <= self.window:
            return [near]
        return [near, Piece(0, here.stop - self.window, nearest=self.window, query=self.beyond, moved=True)]

    def beyond(self, position: Position) -> Position:
        """Return the position that a query is rotated to when it attends to keys beyond the window."""
        return position // self.group + self.window - self.window // self.group

    def largest_distance(self, position: int) -> int:
        return position if position < self.window else self.beyond(position)


def needed_group(num_tokens: int, window: int, trained: int) -> int:
    """Return the smallest group that keeps all distances in `num_tokens` within the trained length."""
    group = 1
    while Grouped(group, window).largest_distance(num_tokens - 1) >= trained:
        group += 1
    return group
