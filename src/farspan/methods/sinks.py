"""Attention sinks with a sliding window (StreamingLLM), positions inside the cache.

    near(i)        = {j : b(i) - window < j <= i}        b(i) = i - i mod stride
    visible(i)     = {j : j < sinks} ∪ near(i)
    distance(i, j) = i - j                                        for near j
                     i - b(i) + min(b(i), sinks + window - 1) - j     for the other sinks

Xiao et al. 2023, arXiv 2309.17453, section 3.2: positions are counted in the cache, so the distance to a sink stops
growing when the cache begins to drop tokens. A window counts the current token: the paper's 4 + 2044 is window=2045.
Ours masks inside a chunk, so any division into chunks gives the result of the token-by-token original. Keeps
sinks + window - 1 keys per layer between calls. Not trained.

stride > 1 is the approximation of CEPE (Yen et al. 2024, appendix B, table 6): the cache is trimmed every `stride`
tokens, counted from the beginning of the text, so that a query sees up to stride - 1 tokens more. It is for
comparisons; ours is as fast without it. Keeps up to stride - 1 keys more.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, cast

from torch import Tensor

from farspan.hf.attend import Position, SinkWindow, sink_window
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM
from farspan.methods.base import ATTENTION, Method
from farspan.reader import Reader, attending
from farspan.specs import limited


@dataclass(frozen=True)
class Sinks(Method):
    """The last `window` tokens and the first `sinks`."""

    window: int | None = limited(None, 1)  # tokens, the current one included; default: all that the trained one allows
    sinks: int = limited(4)  # tokens at the beginning of the text
    stride: int = limited(1, 1, quiet=True)  # tokens between two trimmings of the cache

    name: ClassVar[str] = "sinks"
    changes: ClassVar[tuple[str, ...]] = (ATTENTION,)

    def fitted(self, trained_length: int | None) -> "Sinks":
        if self.window is not None:
            return self
        trained = trained_length or DEFAULT_TRAINED_LENGTH
        if (window := trained - self.sinks - self.stride + 1) < 1:
            raise ValueError(f"{self} leaves no window in the trained length of {trained:,} tokens; use fewer sinks")
        return replace(self, window=window)

    def kept(self, num_tokens: int) -> int:
        return min(num_tokens, (self.window or num_tokens) + self.sinks + self.stride - 2)

    def small(self, num_tokens: int) -> "Sinks":
        few = num_tokens // 16
        window = min(self.window or num_tokens, num_tokens // 5)
        return replace(self, window=window, sinks=min(self.sinks, few), stride=min(self.stride, max(few, 1)))

    def neutral(self, num_tokens: int) -> "Sinks":
        return replace(self, window=max(self.window or num_tokens, num_tokens))

    def neutral_limit(self, trained_length: int | None) -> int | None:
        return None if trained_length is None else trained_length - self.sinks - self.stride

    def forgetful(self, window: int) -> "Sinks":
        return replace(
            self, window=min(self.window or window, window), sinks=min(self.sinks, 8), stride=min(self.stride, 2)
        )

    @property
    def sees(self) -> int | None:
        return self.window

    @property
    def reach(self) -> int | None:
        return None if self.window is None else self.window + self.stride - 1

    @property
    def first(self) -> int:
        return self.sinks

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        if self.window is None:
            return self.fitted(lm.trained_length).on(lm)
        needed, limit = self.sinks + self.window - 1 + self.stride, lm.trained_length
        if limit is not None and needed > limit:
            most = limit - needed + self.window
            fix = f"use window <= {most:,}" if most > 0 else "use fewer sinks"
            raise ValueError(
                f"{self} needs {needed:,} positions, more than the {limit:,} that {lm.name} was trained on; {fix}"
            )
        shape = cast(SinkWindow, self)
        return attending(lm, partial(sink_window, shape=shape), name=str(self), shape=shape)

    def first_near(self, position: Position) -> Position:
        assert self.window is not None
        return position - position % self.stride - self.window + 1

    def far_query(self, position: Tensor) -> Tensor:
        assert self.window is not None
        since = position % self.stride
        return (position - since).clamp_max(self.sinks + self.window - 1) + since

    def far_key(self, position: Tensor) -> Tensor:
        return position
