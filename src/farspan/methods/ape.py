"""Adaptive parallel encoding (APE): passages read separately at the same positions, attended to as one sharpened set.

    z_context = scale · log Σ_j exp(q·k_j / (√d · temperature))      j: tokens of all passages
    z_rest    = log Σ_j exp(q·k_j / √d)                              j: the prefix, and tokens after the passages
    out       = σ(z_context - z_rest) · out_context + σ(z_rest - z_context) · out_rest

Yang et al. 2025, arXiv 2502.05431. `head` is the shared prefix of all passages. Each passage is read after the prefix
alone, at the positions that follow it, with plain attention. Later tokens have the positions after the end of the
longest passage. They attend to the passages (out_context, with scores divided by `temperature`) and separately to the
rest, and the two outputs are weighted by their log-sum-exps. The authors' program multiplies the log-sum-exp of the
passages by scale · temperature; to get its numbers, give this product as `scale`.

The first token after the passages is predicted by the last passage alone, so read a question before scoring an answer.
Long passages are cut from their ends into pieces (`piece`), which are then passages. A layer's own sliding window still
applies, in the order in which the text was read.

With one passage, temperature = 1 and scale = 1 it is full attention. Keeps every key. Not trained.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from farspan.hf.attend import FUSED_QUERIES, Call, mixed, slices
from farspan.hf.flash import Part, combined, flash, hidden_mask, takes
from farspan.hf.remap import in_place
from farspan.lm import LM
from farspan.methods.base import ATTENTION, PASSAGES, TEMPERATURE, Method
from farspan.methods.replug import piece_sizes, pieces
from farspan.reader import CachedMemory, DenseReader, Ids, Reader, Work, attending, in_one_call
from farspan.specs import limited


@dataclass(frozen=True)
class Ape(Method):
    """Passages in parallel, with a temperature and a scale for later tokens."""

    temperature: float = 0.9  # of the scores of the passages
    scale: float = 0.9  # of their log-sum-exp
    piece: int | None = limited(None, 1)  # tokens; longer passages are cut

    name: ClassVar[str] = "ape"
    changes: ClassVar[tuple[str, ...]] = (ATTENTION, TEMPERATURE, PASSAGES)
    in_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.temperature < math.inf and 0 < self.scale < math.inf):
            raise ValueError(f"{self}: temperature and scale must be above 0 and finite; the paper uses up to 1")

    def small(self, num_tokens: int) -> "Ape":
        return replace(self, piece=min(self.piece or num_tokens, num_tokens // 5))

    def neutral(self, num_tokens: int) -> "Ape":
        return Ape(temperature=1.0, scale=1.0)

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        if "position_ids" not in inspect.signature(lm.model.forward).parameters:
            raise ValueError(f"{self} reads passages at the same positions, and {lm.name} takes no positions; use full")
        parallel = Parallel(self.temperature, self.scale)
        with attending(lm, parallel, name=str(self), rotary=False) as reader:
            yield ApeReader(lm, attention=reader.attention, how=self, parallel=parallel)


@dataclass(frozen=True)
class Apart:
    """A range of tokens, in the order in which the text was read, that the next tokens see separately or not at all."""

    start: int
    stop: int
    is_context: bool  # True: all passages, seen by later tokens; False: other passages, not seen by the next one


@dataclass
class Parallel:
    """The attention of APE: full attention except to the tokens `apart`."""

    temperature: float
    scale: float
    apart: Apart | None = None

    def __call__(self, call: Call) -> Float[Tensor, "batch heads groups time value_dim"]:
        apart = self.apart
        if apart is None or apart.start == apart.stop:
            return in_place(call)
        fused = call.softcap is None and takes(call.query, call.key, call.value)
        out = call.query.new_empty(*call.query.shape[:4], call.value.shape[-1])
        keys = call.key.shape[2]
        for block in slices(call.query.shape[3], FUSED_QUERIES) if fused else call.blocks(lambda size: keys):
            first, end = call.start + block.start, call.start + block.stop
            rest = [(0, apart.start), (apart.stop, first), (first, end)]
            merged = combined([part for low, high in rest if (part := _part(call, block, low, high, fused))])
            if apart.is_context and (context := _part(call, block, apart.start, apart.stop, fused, self.temperature)):
                merged = combined([merged, (context[0], context[1] * self.scale)])
            out[..., block, :] = merged[0].to(out.dtype).unflatten(1, call.query.shape[1:3])
        return out


def _part(call: Call, block: slice, low: int, high: int, fused: bool, temperature: float = 1.0) -> Part | None:
    """Return the attention of a block of queries to the tokens from `low` to `high`, and its log-sum-exp; None if none
    of their keys is held."""
    keys = slice(max(0, low - call.num_missing), max(0, high - call.num_missing))
    if keys.start == keys.stop:
        return None
    query, key, value = call.query[..., block, :], call.key[:, :, keys], call.value[:, :, keys]
    if fused:
        window, last = call.layer.window, call.start + block.stop - 1
        narrow = window is not None and last - max(low, call.num_missing) >= window  # than these keys
        causal = low == call.start + block.start and not narrow
        mask = hidden_mask(call.hidden(block, keys), query.dtype)[None, None] if narrow else None
        return flash(query.flatten(1, 2), key, value, causal=causal, mask=mask, scale=call.scale / temperature)
    scores = call.scores(query, key).float() / temperature
    scores = scores.masked_fill_(call.hidden(block, keys), torch.finfo(scores.dtype).min)
    out = mixed(scores.softmax(-1).to(value.dtype), value)
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


@dataclass(kw_only=True)
class ApeReader(DenseReader):
    """Reads each passage after `head` alone."""

    how: Ape
    parallel: Parallel
    incremental: ClassVar[bool] = False
    changes_only_before: ClassVar[bool] = True

    def read(self, *passages: Ids, head: Ids | None = None, weights: Tensor | None = None) -> "ApeMemory":
        """Read `head`, the prefix, and the passages (or their pieces) in parallel. `weights` is ignored.

        Raises:
            ValueError: as `DenseReader.read`.
        """
        memory = ApeMemory(self.lm, self)
        memory.scope = self.attention
        if head is not None:
            memory.read(head)
        memory.read_passages(pieces(passages, self.how.piece))
        return memory

    def forwards(self, work: Iterable[Work], head: int) -> Iterator[Work]:
        """Yield each piece alone, after the tokens before and after all passages: attention is an upper bound."""
        for one in in_one_call(work):
            if one.num_scored:
                yield one
            else:
                passages = (one.num_tokens - head,) if one.passages is None else one.passages
                others = one.num_tokens - sum(passages)
                yield Work(one.num_rows, 0, others, 0)
                sizes = [size for tokens in passages for size in piece_sizes(tokens, self.how.piece)]
                yield from (Work(one.num_rows, others, size, 0) for size in sizes)


class ApeMemory(CachedMemory):
    """Keys and values of a prefix, of passages that follow it at the same positions, and of later tokens."""

    def __init__(self, lm: LM, reader: ApeReader) -> None:
        super().__init__(lm, reader)
        self.parallel = reader.parallel
        self.apart: Apart | None = None

    @property
    def longest(self) -> int:
        return self.num_seen + self.stream.shift

    def read_passages(self, passages: Sequence[Ids]) -> None:
        """Append passages [batch, time], each after the tokens held now; later tokens follow all of them."""
        prefix = self.num_seen
        for passage in passages:
            self.apart = Apart(prefix, self.num_seen, is_context=False)
            self.stream.shift = prefix - self.num_seen
            self.read(passage)
        if passages:
            self.apart = Apart(prefix, self.num_seen, is_context=True)
            self.stream.shift = prefix + max(passage.shape[1] for passage in passages) - self.num_seen

    def _step(self, ids: Ids) -> Tensor:
        self.parallel.apart = self.apart
        try:
            return super()._step(ids)
        finally:
            self.parallel.apart = None
