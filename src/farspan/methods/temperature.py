"""Log-n scaling of attention: queries grow with the number of tokens they choose among.

    q_i · max(1, ln i / ln n)        i: tokens up to the query, itself included; n: `original`

A softmax over more keys is flatter: the largest weight shrinks while its score stays. A factor of ln i / ln n keeps the
weights' concentration, without training. Su 2021, kexue.fm/archives/8823; Chiang and Cholak 2022, arXiv 2202.12172; in
the form above Bai et al. 2023, arXiv 2309.16609 (`use_logn_attn`) and the `scale_base` of Self-Extend's code. Up to n
tokens nothing changes. n stays the model's trained length even if RoPE scaling extends it: the model was
trained to choose among n keys.

The factor multiplies whatever scores another method computes, and the votes of methods that evict. Keeps every key.
Not trained.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from farspan.hf.remap import InPlace, remapped
from farspan.lm import LM
from farspan.methods.base import TEMPERATURE, Method
from farspan.reader import DenseReader, Reader, attending


@dataclass(frozen=True)
class Temperature(Method):
    """Queries beyond `original` tokens are multiplied by ln(tokens) / ln(original)."""

    original: int | None = None  # tokens; default: the model's trained length

    name: ClassVar[str] = "temperature"
    changes: ClassVar[tuple[str, ...]] = (TEMPERATURE,)

    def __post_init__(self) -> None:
        if self.original is not None and self.original < 2:
            raise ValueError(f"{self}: original must be at least 2 tokens, since the queries are divided by its log")

    @classmethod
    def examples(cls) -> tuple["Temperature", ...]:
        return (cls(original=10),)

    def small(self, num_tokens: int) -> "Temperature":
        return replace(self, original=min(self.original or num_tokens, max(2, num_tokens // 16)))

    def neutral(self, num_tokens: int) -> "Temperature":
        return replace(self, original=max(self.original or num_tokens, num_tokens, 2))

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        self._original(lm)
        with (
            attending(lm, partial(remapped, remap=InPlace()), name=str(self), rotary=False) as reader,
            self._scaled(reader),
        ):
            yield reader

    @contextmanager
    def around(self, reader: DenseReader) -> Iterator[Reader]:
        if reader.attention is None:
            with self.on(reader.lm) as own:
                yield own
            return
        with self._scaled(reader):
            yield reader

    def _scaled(self, reader: DenseReader) -> AbstractContextManager[None]:
        assert reader.attention is not None
        return reader.attention.scaled_queries(partial(log_n, original=self._original(reader.lm)))

    def _original(self, lm: LM) -> int:
        # of the model as it was loaded: a RoPE method reports a longer trained length
        if (original := self.original or lm.identity.get("trained_length")) is None or original < 2:
            raise ValueError(f"{self}: the config of {lm.name} has no trained length. Write original=TOKENS")
        return original


def log_n(positions: Int[Tensor, "*shape"], original: int) -> Float[Tensor, "*shape"]:
    """Return the factor of the query at each position, from 0 on."""
    return ((positions + 1).log() / math.log(original)).clamp_min(1.0)
