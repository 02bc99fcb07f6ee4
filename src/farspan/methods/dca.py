"""Dual chunk attention (DCA): distances within chunks, to the chunk before, and one limit for all earlier chunks.

    distance(i, j) = i - j                                      j in the chunk of i
                     min(i mod chunk + chunk, chunk + local) - j mod chunk    in the chunk before it
                     chunk + local - j mod chunk                in an earlier one

An et al. 2024, arXiv 2402.17463, section 3, with the defaults of its code: a chunk of 3/4 of the trained length and a
`local` of 1/8. The first `local` tokens of a chunk keep their exact distances to the chunk before. vLLM has the same as
`dual_chunk_attention_config`, with chunk_size = chunk + local and local_size = local. No distance is larger than that
chunk_size, however long the text. One softmax covers all. A layer's own sliding window still applies.

A query is rotated again for each earlier chunk; keys are not. Keeps every key. Not trained.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from farspan.hf.remap import Piece, remapped
from farspan.lm import LM
from farspan.methods.base import ATTENTION, Method
from farspan.reader import Reader, attending
from farspan.specs import limited


@dataclass(frozen=True)
class Dca(Method):
    """Chunks of `chunk` tokens, the first `local` of which keep their distances to the chunk before."""

    chunk: int | None = limited(None, 1)  # tokens; default: 3/4 of the trained length
    local: int | None = limited(None)  # tokens; default: 1/8 of it, or of 4/3 of the chunk

    name: ClassVar[str] = "dca"
    changes: ClassVar[tuple[str, ...]] = (ATTENTION,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None and self.local is not None and self.local >= self.chunk:
            raise ValueError(f"{self}: local must be less than chunk")

    def small(self, num_tokens: int) -> "Dca":
        chunk = min(self.chunk or num_tokens, num_tokens // 5)
        return replace(self, chunk=chunk, local=min(chunk // 6 if self.local is None else self.local, num_tokens // 16))

    def neutral(self, num_tokens: int) -> "Dca":
        return replace(self, chunk=max(self.chunk or num_tokens, num_tokens), local=0)

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        trained = lm.trained_length
        if (chunk := self.chunk or (trained and max(1, trained * 3 // 4))) is None:
            raise ValueError(f"{self}: the config of {lm.name} has no trained length. Write chunk=TOKENS")
        local = chunk // 6 if self.local is None else self.local
        if trained is not None and chunk + local > trained:
            most = trained - local
            fix = f"chunk <= {most:,}" if most > local else f"local <= {(trained - 1) // 2:,} and a smaller chunk"
            raise ValueError(
                f"{self}: chunk + local = {chunk + local:,} tokens is more than the {trained:,} that {lm.name} was "
                f"trained on; use {fix}"
            )
        if local >= chunk:
            raise ValueError(f"{self}: local must be less than chunk, which is {chunk:,} tokens for {lm.name}")
        return attending(lm, partial(remapped, remap=Chunked(chunk, local)), name=str(self))


@dataclass(frozen=True)
class Chunked:
    """The positions of dual chunk attention, shifted for each chunk so that its keys keep theirs."""

    block: int  # tokens of a chunk
    local: int

    def key(self, position: Int[Tensor, "keys"]) -> Int[Tensor, "keys"]:
        return position

    def pieces(self, here: range) -> list[Piece]:
        begin = here.start // self.block * self.block  # of the queries' chunk
        pieces = [Piece(begin, here.stop)]
        for earlier in range(0, begin, self.block):
            # in chunks before the last one, this is below every query's own position
            query = partial(torch.clamp, max=earlier + self.block + self.local)
            pieces.append(Piece(earlier, earlier + self.block, query=query))
        return pieces
