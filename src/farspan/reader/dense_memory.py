"""The memories of the dense reader: keys and values, chosen ones of them, or the tokens themselves."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farspan import hf
from farspan.hf.chunks import can_branch
from farspan.lm import LM
from farspan.reader.logits import Head, Scores, head_of, joined, scored
from farspan.reader.memory import BaseMemory, Ids

if TYPE_CHECKING:
    from farspan.reader import DenseReader

FEWEST_BRANCHES = 3  # two are as fast one after the other, and need no check


class CachedMemory(BaseMemory):
    """Keys and values, or a recurrent state, of the tokens read."""

    def __init__(self, lm: LM, reader: "DenseReader") -> None:
        super().__init__(lm)
        self.reader = reader  # its settings may change between two calls
        self.stream = hf.Stream(lm.model, reader.capacity, reader.attention)
        self.last: Tensor | None = None  # [batch, 1, hidden]: predicts the next token

    @property
    def num_kept(self) -> int:
        return self.stream.num_kept

    @property
    def num_bytes(self) -> int:
        return self.stream.num_bytes

    @torch.no_grad()
    def read(self, ids: Ids) -> None:
        """Append ids [batch, time].

        Raises:
            ValueError: padding, another batch size than before, or more tokens than the model has positions.
        """
        ids = self._to_read(ids)
        if ids.shape[1] == 0:
            return
        with self._appending():
            for _, hidden in self._steps(ids):
                self.last = hidden[:, -1:].clone()
                if self.reader.on_read is not None:
                    self.reader.on_read(hidden.shape[1])
        self.batch, self.num_seen = ids.shape[0], self.num_seen + ids.shape[1]

    @torch.no_grad()
    def skip(self, num_tokens: int) -> bool:
        """Skip as `Memory.skip`; see `hf.Stream.skip`."""
        with self._appending():
            self.stream.skip(num_tokens)
        self.num_seen += num_tokens
        return True

    def predictions(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        with self.stream.unchanged():
            if len(kept) and kept.start == 0:
                assert self.last is not None
                yield ids[:, :1], head_of(self.lm, self.last, self.stream.output)
            # the last token is scored, never fed; hidden state t predicts token t + 1
            for first, hidden in self._steps(ids[:, : max(kept.stop - 1, 0)].clamp_min(0)):
                low = max(kept.start - 1 - first, 0)
                if low < hidden.shape[1]:
                    targets = ids[:, first + low + 1 : first + hidden.shape[1] + 1]
                    yield targets, head_of(self.lm, hidden[:, low:], self.stream.output)

    def _score_groups(self, ids: Tensor, kept: range) -> list[Scores]:
        """Return the scores of the groups; if the model allows it, one forward scores as many as fit into a chunk."""
        fed = kept.stop - 1
        together = self.reader.chunk // max(fed, 1)
        worth = len(ids) >= FEWEST_BRANCHES and together > 1 and len(kept) > 0
        if not (worth and self.stream.can_branch and can_branch(self.lm)):
            return super()._score_groups(ids, kept)
        return [scores for few in ids.split(together) for scores in self._score_branches(few, kept)]

    def _score_branches(self, ids: Tensor, kept: range) -> list[Scores]:
        count, batch, _ = ids.shape
        parts: list[list[Scores]] = [[] for _ in range(count)]
        if kept.start == 0:  # the same logits predict the first token of all
            assert self.last is not None
            logits = head_of(self.lm, self.last, self.stream.output)(slice(None))
            for part, first in zip(parts, ids[:, :, :1], strict=True):
                part += scored(self.lm, first, lambda _: logits)
        low = max(kept.start - 1, 0)
        if low < kept.stop - 1:
            with self.stream.unchanged():
                hidden = self.stream.branch(ids[:, :, : kept.stop - 1].clamp_min(0))[:, :, low:]
                targets = ids[:, :, low + 1 : kept.stop]
                rows = hidden.transpose(0, 1).reshape(batch, -1, hidden.shape[-1])
                head = head_of(self.lm, rows, self.stream.output)
                scores = joined(list(scored(self.lm, targets.transpose(0, 1).reshape(batch, -1), head)), ids[0])
            time = targets.shape[2]
            each = zip(parts, scores.nats.split(time, 1), scores.rank.split(time, 1), strict=True)
            for part, nats, rank in each:
                part.append(Scores(nats, rank))
        return [joined(part, ids[0]) for part in parts]

    @contextmanager
    def fork(self) -> Iterator[Callable[[Tensor], Tensor]]:
        last = self.last

        def expect(ids: Tensor) -> Tensor:
            nonlocal last
            for _, hidden in self._steps(ids):
                last = hidden[:, -1:]
            assert last is not None
            return hf.logits(self.lm.model, last, self.stream.output)[:, -1].float()

        with self.stream.unchanged():
            yield expect

    def _steps(self, ids: Ids) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, ids.shape[1], self.reader.chunk):
            yield first, self._step(ids[:, first : first + self.reader.chunk])

    def _step(self, ids: Ids) -> Tensor:
        return self.stream.step(ids)


class EvictingMemory(CachedMemory):
    """Keys and values of a text; from the first `score` or `generate` on, only those chosen by the `Eviction`.

    The text is read with full attention. The first call of `score` or `generate` drops the other keys permanently. A
    later `read` needs them, so it reads the whole text again: scores depend only on the text and the tokens scored,
    never on earlier calls.
    """

    def __init__(self, lm: LM, reader: "DenseReader") -> None:
        super().__init__(lm, reader)
        self.text: Tensor | None = None  # [batch, time], int32

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self.text is None else self.text.nbytes)

    def read(self, ids: Ids) -> None:
        """Append ids [batch, time]; as `CachedMemory.read`."""
        ids = self._to_read(ids)
        text = ids.int() if self.text is None else torch.cat([self.text, ids.int()], 1)
        if self.stream.reading.evicted and ids.shape[1]:
            self.num_seen, self.stream = 0, hf.Stream(self.lm.model, self.reader.capacity, self.reader.attention)
            ids = text.long()
        super().read(ids)
        self.text = text

    def predictions(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        self._evict()
        yield from super().predictions(ids, kept)

    @contextmanager
    def fork(self) -> Iterator[Callable[[Tensor], Tensor]]:
        self._evict()
        with super().fork() as expect:
            yield expect

    def _evict(self) -> None:
        if not self.stream.reading.evicted:
            with self._appending():
                self.stream.evict()


class PlainMemory(BaseMemory):
    """The tokens themselves, for models that cannot be read in chunks: every score is one forward over all of them."""

    def __init__(self, lm: LM) -> None:
        super().__init__(lm)
        self.ids: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.ids is None else self.ids.nbytes

    def read(self, ids: Ids) -> None:
        """Append ids [batch, time]; as `CachedMemory.read`."""
        ids = self._to_read(ids)
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        self.batch, self.num_seen = ids.shape[0], self.ids.shape[1]

    def predictions(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        fed, real = ids[:, : max(kept.stop - 1, 0)], ids[:, : kept.stop] >= 0
        if not bool(real.all()) and hf.length_dependent_rope(self.lm.model):
            hidden, output = self._hidden_by_length(fed, (real.sum(1) - 1).clamp_min(0))
        else:
            hidden, output = self._hidden(fed.clamp_min(0))
        wanted = hidden[:, self.num_seen - 1 + kept.start : self.num_seen - 1 + kept.stop]
        yield ids[:, kept.start : kept.stop], head_of(self.lm, wanted, output)

    @contextmanager
    def fork(self) -> Iterator[Callable[[Tensor], Tensor]]:
        fed: list[Tensor] = []

        def expect(ids: Tensor) -> Tensor:
            fed.append(ids)
            hidden, output = self._hidden(torch.cat(fed, 1))
            return hf.logits(self.lm.model, hidden[:, -1:], output)[:, -1].float()

        yield expect

    def _hidden(self, ids: Tensor, rows: Tensor | slice = slice(None)) -> tuple[Tensor, object]:
        assert self.ids is not None
        return hf.plain_hidden(self.lm.model, torch.cat([self.ids[rows], ids], 1))

    def _hidden_by_length(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, object]:
        """Return the hidden states of rows with padding, whose RoPE depends on the real number of tokens of a row."""
        hidden, output = None, None
        for length in lengths.unique().tolist():
            rows = lengths == length
            part, output = self._hidden(ids[rows, :length], rows)
            if hidden is None:
                hidden = part.new_zeros(len(ids), self.num_seen + ids.shape[1], part.shape[2])
            hidden[rows, : part.shape[1]] = part
        assert hidden is not None
        return hidden, output
