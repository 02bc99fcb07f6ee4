"""The Λ-shaped mask with a ceiling on distance (LM-Infinite).

    visible(i)     = {j : j < sinks} ∪ {j : i - window < j <= i}
    distance(i, j) = min(i - j, window)

Han et al. 2023, arXiv 2308.16137, section 3.2: a local branch of `window` tokens, a global branch of the first 10 to
100, and no distance beyond the trained length. The paper sets window and ceiling to one number, and so does ours, so
the ceiling applies only to the first tokens. A window counts the current token. Unlike `sinks`, every first token
outside the window is at the same distance. Keeps sinks + window - 1 keys per layer between calls. Not trained.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor

from farspan.hf.attend import Position, SinkWindow, sink_window
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM
from farspan.methods.base import ATTENTION, Method
from farspan.reader import Reader, attending
from farspan.specs import limited


@dataclass(frozen=True)
class LambdaMask(Method):
    """The last `window` tokens and the first `sinks`, at most `window` tokens away."""

    # tokens, the current one included; also the largest distance; default: the trained length
    window: int | None = limited(None, 1)
    sinks: int = limited(10)  # tokens at the beginning of the text

    name: ClassVar[str] = "lambda_mask"
    changes: ClassVar[tuple[str, ...]] = (ATTENTION,)

    def fitted(self, trained_length: int | None) -> "LambdaMask":
        return self if self.window is not None else replace(self, window=trained_length or DEFAULT_TRAINED_LENGTH)

    def kept(self, num_tokens: int) -> int:
        return min(num_tokens, (self.window or num_tokens) + self.sinks - 1)

    def small(self, num_tokens: int) -> "LambdaMask":
        return replace(
            self, window=min(self.window or num_tokens, num_tokens // 5), sinks=min(self.sinks, num_tokens // 16)
        )

    def neutral(self, num_tokens: int) -> "LambdaMask":
        return replace(self, window=max(self.window or num_tokens, num_tokens))

    def forgetful(self, window: int) -> "LambdaMask":
        return replace(self, window=min(self.window or window, window), sinks=min(self.sinks, 8))

    @property
    def sees(self) -> int | None:
        return self.window

    @property
    def reach(self) -> int | None:
        return self.window

    @property
    def first(self) -> int:
        return self.sinks

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        if self.window is None:
            return self.fitted(lm.trained_length).on(lm)
        limit = lm.trained_length
        if limit is not None and self.window > limit:
            raise ValueError(
                f"{self}: window = {self.window:,} tokens is more than the {limit:,} that {lm.name} was trained on; "
                f"use window <= {limit:,}"
            )
        shape = cast(SinkWindow, self)
        return attending(lm, partial(sink_window, shape=shape), name=str(self), shape=shape)

    def first_near(self, position: Position) -> Position:
        assert self.window is not None
        return position - self.window + 1

    def far_query(self, position: Tensor) -> Tensor:
        assert self.window is not None
        return torch.full_like(position, self.window)

    def far_key(self, position: Tensor) -> Tensor:
        return torch.zeros_like(position)
