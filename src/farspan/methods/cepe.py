"""Parallel encoding: the last tokens in the decoder, all earlier ones in the encoder, chunk by chunk (CEPE).

    Φ = concat(encoder(C_1), ..., encoder(C_k))        p(x_t | C_1..k, x_<t), x after the chunks, at positions from 0

Yen et al. 2024, arXiv 2402.16617, section 2.1. For models with an encoder (`farspan.cepe`). The decoder holds at most
`decoder_window` tokens: the head, the end of the document, and the tokens scored or generated. If the
document is longer, as few whole chunks as necessary move from its beginning to the encoder. Chunks are counted from the
document's beginning, and nothing runs before the first score, so it does not matter in which pieces a document was
read. If a document is longer than the window, scoring more tokens at once leaves fewer tokens before them in the
decoder. Tokens that do not fit are scored in parts of half the window.

Several passages are encoded separately, except for the first `decoder_passages`, which precede later tokens in the
decoder. For a model without order the chunks are a set: the order of encoded passages has no effect.

With `trained_chunks`, scores of the cross-attention are multiplied by max(1, ln(chunks) / ln(trained_chunks)), so that
a softmax over more tokens than in training stays as sharp. Ours; the rule of `temperature`, applied to chunks.

A model with order (`farspan.cepe.order`) also uses the distance of each encoded token to the decoder's first, or the
age of its chunk; passages count as one text, in their order. `order` is the order that a model must have, or none to
read without it.

Keeps the encoder's states, and the keys and values of the tokens in the decoder. With everything in the decoder, it
equals the base model. Trained (farspan train cepe).
"""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from farspan import hf
from farspan.cepe import MODES, CepeModel, Context
from farspan.cepe.config import num_states, order_of
from farspan.cepe.cost import Sizes, memory, prefill_flops
from farspan.cepe.encoder import encode, window_of
from farspan.cepe.order import ORDERS, ContextOrder
from farspan.lm import LM
from farspan.methods.base import Method
from farspan.reader import BaseMemory, Head, Ids, Memory, OuterReader, Reader, dense_reader
from farspan.reader.checks import check_ids
from farspan.specs import choice, limited

CHUNK = 256  # tokens; as the published models were trained
DECODER_WINDOW = 2048  # tokens


@dataclass(frozen=True)
class Cepe(Method):
    """The last tokens in the decoder, the rest in the encoder."""

    chunk: int | None = limited(None, 1)  # tokens; default 256, or as many as encoder and decoder window allow
    decoder_window: int | None = limited(None, 2)  # tokens; default 2048, or half the decoder's trained length
    decoder_passages: int = limited(0, quiet=True)  # of several, the number put into the decoder
    trained_chunks: int | None = limited(None, 2)  # of a training row: more then sharpen the cross-attention
    order: str | None = choice(ORDERS, None)  # of the context; default: the model's own
    mode: str = choice(MODES, "auto", quiet=True)  # of the cross-attention

    name: ClassVar[str] = "cepe"
    in_model: ClassVar[bool] = False
    scores_as_it_reads: ClassVar[bool] = False

    def kept(self, num_tokens: int) -> int:
        return min(num_tokens, self.decoder_window or DECODER_WINDOW)

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        if not isinstance(lm.model, CepeModel):
            raise ValueError(
                f"cepe reads with an encoder, and {lm.name} has none: give a CEPE model (farspan train cepe makes "
                "one), or use another method"
            )
        scope = hf.Scope("cepe")
        try:
            chunk, window = self._sizes(lm)
            yield CepeReader(dense_reader(lm), self, chunk, window, self._order(lm), scope)
        finally:
            scope.on = False

    def _order(self, lm: LM) -> ContextOrder | None:
        """Return the order to add to the states of this model's encoder; None: no order."""
        has = order_of(lm.model.config)
        if self.order not in (None, "none", has):
            raise ValueError(
                f"{self}: {lm.name} has no weights for order by {self.order}, its order is {has}: leave order out, or "
                f'train a model with model.order = "{self.order}" (farspan train cepe)'
            )
        return None if self.order == "none" else lm.model.context_order

    def _sizes(self, lm: LM) -> tuple[int, int]:
        """Return the tokens of a chunk and of the decoder's window for this model."""
        window = self.decoder_window or min(DECODER_WINDOW, (lm.trained_length or 2 * DECODER_WINDOW) // 2)
        limit = window_of(lm.model.encoder)
        chunk = self.chunk or min(CHUNK, limit or CHUNK, max(1, window // 2))
        if limit is not None and chunk > limit:
            raise ValueError(f"{self}: chunk = {chunk} is longer than the encoder's window; use chunk <= {limit}")
        if chunk >= window:
            raise ValueError(f"{self}: chunk = {chunk} fills decoder_window = {window}; use chunk < {window}")
        if lm.position_limit is not None and window > lm.position_limit:
            raise ValueError(
                f"{self}: decoder_window = {window:,} is more than the {lm.position_limit:,} positions of {lm.name}; "
                f"use decoder_window <= {lm.position_limit:,}"
            )
        return chunk, window


@dataclass
class CepeReader(OuterReader):
    """Keeps ids; each score runs the encoder and the decoder (`inner`)."""

    how: Cepe
    size: int  # tokens of a chunk of the context
    window: int  # tokens in the decoder
    order: ContextOrder | None
    scope: hf.Scope

    def inner_capacity(self, num_tokens: int) -> int:
        return min(num_tokens, self.window)

    def bytes_needed(self, num_rows: int, num_tokens: int) -> dict[str, int]:
        model, in_decoder = self.lm.model, min(num_tokens, self.window)
        parts = memory(
            Sizes.of(model.config),
            Sizes.of(model.encoder.config),
            weights=sum(p.nbytes for p in model.parameters()),
            context=num_tokens - in_decoder,
            tokens=in_decoder,
            rows=num_rows,
            at_once=self.chunk,
            kept=0,
            itemsize=model.dtype.itemsize,
        )
        held = 1 if self.order is None else 2  # without order (for longer documents) and with it
        parts["context_states"] *= held * num_states(model.config)
        return parts

    def flops(self, num_before: int, num_tokens: int, num_scored: int) -> float:
        """Return the operations as `Reader.flops`. Nothing runs before the first score; then the decoder reads its
        window, and the encoder the chunks before it."""
        if not num_scored:
            return 0.0
        total = num_before + num_tokens
        own = min(total, self.window)
        sizes = Sizes.of(self.lm.model.config), Sizes.of(self.lm.model.encoder.config)
        return prefill_flops(*sizes, context=total - own, tokens=own, kept=num_scored, chunk=self.size)

    def read(self, *passages: Ids, head: Ids | None = None, weights: Tensor | None = None) -> Memory:
        """Read one passage as a document whose end is in the decoder; of several, encode all but the first
        `decoder_passages`. `head` comes first in the decoder. `weights` is ignored.

        Raises:
            ValueError: padding, different batch sizes, or a head that fills the window.
        """
        memory = CepeMemory(self)
        if head is not None:
            memory.begin(head)
        in_decoder = self.how.decoder_passages if len(passages) > 1 else 1
        for passage in passages[:in_decoder]:
            memory.read(passage)
        for passage in passages[in_decoder:]:
            memory.encode(passage)
        return memory


class CepeMemory(BaseMemory):
    """The ids of head, passages and document, the encoder's states, and the decoder's memory of the rest."""

    def __init__(self, reader: CepeReader) -> None:
        super().__init__(reader.lm)
        self.reader, self.scope = reader, reader.scope
        self.model: Any = reader.lm.model
        self.head: Tensor | None = None  # [batch, time]
        self.document: Tensor | None = None  # [batch, time]; chunks count from its beginning
        self.states: tuple[Tensor, ...] | None = None  # of passages, then of the document's first chunks
        self.passage_tokens = 0  # always in the encoder
        self.decoder: tuple[int, Context | None, BaseMemory] | None = None  # chunks encoded, their states, and the rest

    @property
    def num_encoded(self) -> int:
        """Tokens read by the encoder instead of the decoder, as of the last call of `score` or `generate`."""
        return self.passage_tokens + (self.decoder[0] * self.reader.size if self.decoder else 0)

    @property
    def num_bytes(self) -> int:
        held = sum(t.nbytes for t in (self.head, self.document, *(self.states or ())) if t is not None)
        if self.decoder is None:
            return held
        _, context, rest = self.decoder
        keys = 0 if context is None else sum(t.nbytes for pair in context.kept.values() for t in pair)
        if self.reader.order is not None and context is not None:
            added = {id(t): t.nbytes for t in context.states[-self.reader.order.layers :]}  # layers can share them
            keys += sum(added.values())
        return held + keys + rest.num_bytes

    def begin(self, ids: Ids) -> None:
        """Put `ids` before everything else in the decoder.

        Raises:
            ValueError: padding, or too many ids to fit the window with a chunk and a scored token.
        """
        ids = self._to_read(ids)
        most = self.reader.window - self.reader.size - 1
        if ids.shape[1] > most:
            raise ValueError(
                f"a head of {ids.shape[1]:,} tokens is too long for the decoder's window of {self.reader.window:,}, "
                f"which must also hold a chunk of {self.reader.size:,}: use decoder_window, or a shorter head"
            )
        self.head = ids
        self._count(ids)

    def read(self, ids: Ids) -> None:
        """Append ids [batch, time] to the document.

        Raises:
            ValueError: padding, or another batch size than before.
        """
        ids = self._to_read(ids)
        self.document = ids if self.document is None else torch.cat([self.document, ids], 1)
        self._count(ids)

    @torch.no_grad()
    def encode(self, ids: Ids) -> None:
        """Add a passage [batch, time] that is encoded separately, in chunks from its beginning."""
        ids = self._to_read(ids)
        if ids.shape[1]:
            size = min(self.reader.size, ids.shape[1])  # a passage shorter than a chunk is not padded
            padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % size), value=-1).view(len(ids), -1, size)
            with self._appending():
                self._encode(padded.clamp_min(0), (padded >= 0).long())
            self.passage_tokens += ids.shape[1]
        self._count(ids)

    def predictions(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        memory, size = self, self._part(ids.shape[1])
        for first in range(0, min(ids.shape[1], kept.stop), size):
            part = ids[:, first : first + size]
            if first:
                memory = memory._followed_by(ids[:, first - size : first].clamp_min(0))
            low, high = max(kept.start - first, 0), min(kept.stop - first, part.shape[1])
            if low < high:
                context, rest = memory._run(part.shape[1])
                with self.model.attending(context), closing(rest.predictions(part, range(low, high))) as predicted:
                    yield from predicted

    @contextmanager
    def fork(self) -> Iterator[Callable[[Tensor], Tensor]]:
        context, rest = self._run(0)
        with self.model.attending(context), rest.fork() as expect:
            yield expect

    @torch.no_grad()
    def generate(self, ids: Ids, max_new_tokens: int, **how: Any) -> list[Tensor]:
        """Generate as `BaseMemory.generate`; the decoder's window reserves all new tokens from the start.

        Raises:
            ValueError: also if ids and new tokens do not fit into the window.
        """
        self._to_ask(ids)
        with self._alone():
            context, rest = self._run(ids.shape[1] + max_new_tokens)
            with self.model.attending(context):
                return rest.generate(ids, max_new_tokens, **how)

    def _count(self, ids: Tensor) -> None:
        if ids.shape[1]:
            self.batch, self.num_seen = ids.shape[0], self.num_seen + ids.shape[1]

    def _checked(self, ids: Ids, *, after: int) -> Ids:
        check_ids(self.lm, ids)
        super()._checked(ids[..., :1], after=0)  # only tokens in the decoder have positions
        return ids.to(self.lm.device)

    @property
    def _lengths(self) -> tuple[int, int]:
        """The numbers of tokens of head and document."""
        head, document = (0 if t is None else t.shape[1] for t in (self.head, self.document))
        return head, document

    def _chunks(self, more: int) -> int:
        """Return how many chunks to encode so that the rest and `more` tokens fit the window."""
        head, document = self._lengths
        over = max(0, head + document + more - self.reader.window)
        needed, whole = -(-over // self.reader.size), document // self.reader.size
        if head == 0 and whole * self.reader.size == document:
            whole -= 1  # a token must precede the scored ones
        return min(needed, max(whole, 0))

    def _left(self, more: int) -> int:
        """Return the tokens left in the window when `more` tokens are scored; negative: they do not fit."""
        head, document = self._lengths
        return self.reader.window - head - document + self._chunks(more) * self.reader.size - more

    def _part(self, more: int) -> int:
        """Return the tokens to score at once."""
        if self._left(more) >= 0:
            return more or 1
        available = self.reader.window - self._lengths[0]
        return max(1, min(available // 2, available - self.reader.size))

    def _followed_by(self, ids: Tensor) -> "CepeMemory":
        """Return this memory with more tokens in its document; encoded states are shared."""
        memory = copy(self)
        memory.decoder = None
        memory.read(ids)
        return memory

    @torch.no_grad()
    def _run(self, more: int) -> tuple[Context | None, BaseMemory]:
        """Return the context, and the decoder's memory of the rest, for scoring `more` tokens."""
        if self._left(more) < 0:
            raise ValueError(
                f"{more:,} tokens at once do not fit into the decoder's window of {self.reader.window:,} after "
                f"{sum(self._lengths) - self._chunks(more) * self.reader.size:,} others: score fewer, or use "
                "a larger decoder_window"
            )
        if sum(self._lengths) == 0:
            raise ValueError(
                "all passages are in the encoder, so nothing predicts the first token: give a head, such as a "
                "separator, or use decoder_passages"
            )
        chunks = self._chunks(more)
        start = chunks * self.reader.size
        if self.decoder is None or self.decoder[0] != chunks:
            self.decoder = None  # freed before the next one is made
            context = self._context(chunks)
            with self.model.attending(context):
                rest = self.reader.inner.read(head=self.head)
            self.decoder = chunks, context, rest
        _, context, rest = self.decoder
        if self.document is not None:
            done = rest.num_seen - self._lengths[0]
            with self.model.attending(context):
                rest.read(self.document[:, start + done :])
        return context, rest

    def _context(self, chunks: int) -> Context | None:
        """Return the states of passages and of the document's first chunks, encoding those that are not encoded yet."""
        end, order = self.passage_tokens + chunks * self.reader.size, self.reader.order
        if order is not None:
            order.check(end)
        done = 0 if self.states is None else self.states[0].shape[1]
        if done < end and self.document is not None:
            ids = self.document[:, done - self.passage_tokens : chunks * self.reader.size]
            self._encode(ids.reshape(len(ids), -1, self.reader.size))
        if end == 0 or self.states is None:
            return None
        trained, encoded = self.reader.how.trained_chunks, end / self.reader.size
        factor = max(1.0, math.log(encoded) / math.log(trained)) if trained is not None else 1.0
        states = tuple(states[:, :end] for states in self.states)
        if order is not None:
            distances = torch.arange(end, 0, -1, device=states[0].device).expand(len(states[0]), -1)
            states = order(states, distances, self.reader.size)
        return Context(states, mode=self.reader.how.mode, score_factor=factor)  # type: ignore[arg-type]

    def _encode(self, ids: Tensor, mask: Tensor | None = None) -> None:
        further = encode(self.model.encoder, ids, mask, num_states=num_states(self.model.config)).states
        before = self.states or (None,) * len(further)
        self.states = tuple(f if b is None else torch.cat([b, f], 1) for b, f in zip(before, further, strict=True))
