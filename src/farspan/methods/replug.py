"""One pass per passage, and a mixture of the predictions (RePlug).

    p(x_t | x_<t) = Σ_c w_c p(x_t | passage_c, x_<t)

Shi et al. 2023, arXiv 2301.12652, section 3.2: each passage precedes its own copy of the text, and the next-token
distributions are averaged, w = softmax of the score of each passage for the text (`bm25`, `dense`) or 1 / n
(`uniform`). Passages are compared with the first 256 tokens after them, as in CEPE (Yen et al. 2024, appendix B).
Weights do not depend on the tokens scored or generated, so no token influences its own prediction.

A long document can also be read as passages (`piece`): it is cut from its end into pieces, of which the first may be
shorter, and its last `tail` tokens follow every piece. CEPE's baseline is piece=256,tail=3840,weights=dense.

`head` comes first in every pass. Keeps every key of each pass. Not trained.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from farspan.lm import LM
from farspan.methods.base import PASSAGES, Method
from farspan.reader import (
    BaseMemory,
    DenseReader,
    Head,
    Ids,
    Memory,
    OuterReader,
    Reader,
    Work,
    dense_reader,
    in_one_call,
)
from farspan.specs import choice, limited
from farspan.text import encoders, retrieval

WEIGHTS = ("uniform", "bm25", "dense")
QUERY = 256  # tokens after the passages to compare them with


@dataclass(frozen=True)
class Replug(Method):
    """A pass for each passage, mixed by weights."""

    weights: str = choice(WEIGHTS, "uniform")
    piece: int | None = limited(None, 1)  # tokens; longer passages are cut
    tail: int = limited(0, quiet=True)  # tokens at the end of the last passage that all pieces see
    encoder: str = field(default=retrieval.ENCODER, metadata={"quiet": True})  # for weights=dense

    name: ClassVar[str] = "replug"
    changes: ClassVar[tuple[str, ...]] = (PASSAGES,)
    in_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder != retrieval.ENCODER and self.weights != "dense":
            raise ValueError(
                f"encoder={self.encoder} has no effect on replug weights={self.weights}: use weights=dense, or leave "
                "encoder out"
            )

    @property
    def files(self) -> tuple[Path, ...]:
        return encoders.files_of(self.encoder) if self.weights == "dense" else ()

    def kept(self, num_tokens: int) -> int:
        return sum(self.passes(num_tokens))

    def passes(self, *passages: int) -> list[int]:
        """Return the tokens of the passes of passages, each given by its tokens."""
        *first, last = passages or (0,)
        tail = min(self.tail, last)
        sizes = [size for one in (*first, last - tail) for size in piece_sizes(one, self.piece)]
        return [size + tail for size in sizes] or [tail]

    def small(self, num_tokens: int) -> "Replug":
        piece = min(self.piece or num_tokens, num_tokens // 5)
        return replace(self, piece=piece, tail=min(self.tail, num_tokens // 16))

    def neutral(self, num_tokens: int) -> "Replug":
        return replace(self, piece=None, tail=0)

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        return self.around(dense_reader(lm))

    def around(self, reader: DenseReader) -> AbstractContextManager[Reader]:
        return nullcontext(MixtureReader(reader, self))


@dataclass
class MixtureReader(OuterReader):
    """Reads each passage in a pass of its own."""

    how: Replug
    incremental: ClassVar[bool] = False
    changes_only_before: ClassVar[bool] = True

    def inner_capacity(self, num_tokens: int) -> int:
        return num_tokens if self.how.piece is None else 0  # a piece needs only a part of it

    def forwards(self, work: Iterable[Work], head: int) -> Iterable[Work]:
        return self.inner.forwards(self._passes(work, head), head)

    def _passes(self, work: Iterable[Work], head: int) -> Iterator[Work]:
        read, sizes = 0, [0]  # tokens of the whole text, and of each pass
        for one in in_one_call(work):
            if one.num_scored:
                yield from (replace(one, num_before=size + one.num_before - read) for size in sizes)
            else:
                read = one.num_tokens
                passages = (read - head,) if one.passages is None else one.passages
                others = read - sum(passages)  # before and after the passages, which every pass reads
                sizes = [others + size for size in self.how.passes(*passages)]
                yield from (Work(one.num_rows, 0, size, 0) for size in sizes)

    def check_answers(self, passages: Sequence[Ids]) -> None:
        if self.how.weights != "uniform" and not self.how.tail and (count := len(pieces(passages, self.how.piece))) > 1:
            raise ValueError(_nothing_follows(self.how, count))

    def read(self, *passages: Ids, head: Ids | None = None, weights: Tensor | None = None) -> Memory:
        """Read each passage (or piece) in a pass of its own, `head` first in each.

        Args:
            weights: of the passes, [passes] or [batch, passes], not negative; default the method's own.

        Raises:
            ValueError: weights of another shape, negative ones, or an error of the passes' own reader.
        """
        parts, tail = list(passages), None
        if parts and self.how.tail:
            whole = parts.pop()
            cut = max(0, whole.shape[1] - self.how.tail)
            parts, tail = [*parts, whole[:, :cut]], whole[:, cut:]
        parts = pieces(parts, self.how.piece)
        passes = [self.inner.read(part, head=head) for part in parts] or [self.inner.read(head=head)]
        memory = MixtureMemory(self, passes, parts, weights)
        if tail is not None:
            memory.read(tail)
        return memory


class MixtureMemory(BaseMemory):
    """The memories of all passes, which are scored together."""

    def __init__(
        self, reader: MixtureReader, passes: Sequence[BaseMemory], passages: Sequence[Ids], weights: Tensor | None
    ) -> None:
        super().__init__(reader.lm)
        self.how = reader.how
        self.passes = passes
        self.passages = passages
        self.batch, self.scope = self.passes[0].batch, self.passes[0].scope
        sizes = [passage.shape[1] for passage in passages]  # tokens
        self.num_seen = self.longest - max(sizes, default=0) + sum(sizes)
        self.query = torch.empty(self.batch, 0, dtype=torch.long)
        self.fits: Tensor | None = None  # log-weights from the query; scored tokens do not change them
        self.weights = None if weights is None else self._normal(weights)

    @property
    def longest(self) -> int:
        return max(one.longest for one in self.passes)

    @property
    def num_kept(self) -> int:
        return sum(one.num_kept for one in self.passes)

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.passes)

    def read(self, ids: Ids) -> None:
        """Append ids [batch, time] to every pass; as `CachedMemory.read`."""
        ids = self._to_read(ids)
        if ids.shape[1] == 0:
            return
        with self._appending():
            for one in self.passes:
                one.read(ids)
        if self.query.shape[1] < QUERY and self.num_seen:
            self.query = torch.cat([self.query.reshape(len(ids), -1), ids.cpu()], 1)[:, :QUERY]
            self.fits = None
        self.batch, self.num_seen = ids.shape[0], self.num_seen + ids.shape[1]

    def predictions(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        weights = self._log_weights()
        with ExitStack() as stack:
            each = [stack.enter_context(closing(one.predictions(ids, kept))) for one in self.passes]
            for parts in zip(*each, strict=True):
                yield parts[0][0], _mixture([head for _, head in parts], weights)

    @contextmanager
    def fork(self) -> Iterator[Callable[[Tensor], Tensor]]:
        weights = self._log_weights()
        with ExitStack() as stack:
            each = [stack.enter_context(one.fork()) for one in self.passes]

            def expect(ids: Tensor) -> Tensor:
                heads: list[Head] = [lambda _, one=one: one(ids)[:, None] for one in each]  # type: ignore[misc]
                return _mixture(heads, weights)(slice(None))[:, 0]

            yield expect

    def _log_weights(self) -> Float[Tensor, "batch passes"]:
        # on the device: a copy for every block of logits, or new token, would wait for it
        return self._weights_on_cpu().to(self.lm.device)

    def _weights_on_cpu(self) -> Float[Tensor, "batch passes"]:
        if self.weights is not None:
            return self.weights.log()
        count = len(self.passes)
        if self.how.weights == "uniform" or count == 1:
            return torch.full((self.batch, count), 1 / count).log()
        if self.query.shape[1] == 0:
            raise ValueError(f"{_nothing_follows(self.how, count)}; in Python, memory.read(question) reads one")
        if self.fits is None:
            self.fits = torch.stack([self._fit(row) for row in range(self.batch)]).log_softmax(-1)
        return self.fits

    def _fit(self, row: int) -> Float[Tensor, "passes"]:
        query, *texts = (self.lm.tokenizer.decode(ids[row].tolist()) for ids in (self.query, *self.passages))
        bm25 = self.how.weights == "bm25"
        fits = retrieval.bm25(query, texts) if bm25 else retrieval.dense(query, texts, self.how.encoder)
        return torch.tensor(fits, dtype=torch.float32)

    def _normal(self, weights: Tensor) -> Float[Tensor, "batch passes"]:
        count = len(self.passes)
        if tuple(weights.shape) not in ((count,), (self.batch, count)) or bool((weights < 0).any()):
            raise ValueError(
                f"weights {weights.tolist()} do not fit {self.batch} rows of {count} passes: give one number, zero or "
                "more, for each pass, or one for each row and pass"
            )
        weights = weights.detach().float().cpu().expand(self.batch, count)
        if not bool((weights.sum(-1) > 0).all()):
            raise ValueError("weights of a row are all zero: give at least one above zero")
        return weights / weights.sum(-1, keepdim=True)


def _nothing_follows(how: Replug, count: int) -> str:
    return (
        f"{how} compares passages with the text read after them, and here no text follows: got {count} passages "
        "without a tail. Use weights=uniform, or tail=TOKENS to put the end of the last text after every passage"
    )


def _mixture(heads: Sequence[Head], log_weights: Float[Tensor, "batch passes"]) -> Head:
    """Return a head for the log-probabilities of the mixture; it holds those of at most two passes at a time."""

    def head(positions: slice) -> Tensor:
        def part(one: Head, log_weight: Tensor) -> Tensor:
            log_p = one(positions).log_softmax(-1, dtype=torch.float32)
            return log_p.add_(log_weight.to(log_p.device)[:, None, None])

        return reduce(torch.logaddexp, map(part, heads, log_weights.unbind(1)))

    return head


def piece_sizes(num_tokens: int, size: int | None) -> list[int]:
    """Return the tokens of the pieces of a text, cut from its end; the first may be shorter. None: it is not cut."""
    size = size or max(num_tokens, 1)
    rest, whole = num_tokens % size, num_tokens // size
    return [rest] * (rest > 0) + [size] * whole


def pieces(passages: Iterable[Ids], size: int | None) -> list[Ids]:
    """Return the pieces of passages [batch, time], as `piece_sizes`; none of a passage without tokens."""
    return [piece for ids in passages for piece in ids.split(piece_sizes(ids.shape[1], size), dim=1)]
