"""The tokens that a reader keeps: the protocol, and the base of all memories.

memory.score(ids) and memory.generate(ids) do not change the memory and can be called any number of times.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from farspan import hf
from farspan.lm import LM
from farspan.reader.checks import check_ids, check_new_tokens, check_positions
from farspan.reader.logits import Head, NotFiniteError, Sampling, Scores, check_sampling, joined, next_token, scored

Ids = Int[Tensor, "batch _"]  # rows of one length (`_`: any); -1 marks right padding, if a method allows it


@runtime_checkable
class Memory(Protocol):
    """The tokens that a reader keeps. Members with a body are defaults for classes that inherit from `Memory`."""

    num_seen: int  # tokens read

    @property
    def num_kept(self) -> int:
        """Tokens still held, largest over layers."""
        return self.num_seen

    @property
    def num_encoded(self) -> int:
        """Tokens read by an encoder instead of the decoder, as of the last call of `score` or `generate`."""
        return 0

    @property
    def num_bytes(self) -> int: ...  # held for this memory

    def read(self, ids: Ids) -> None: ...

    def skip(self, num_tokens: int) -> bool:
        """Count this many tokens as read, with random keys, to time the steps after a long text; return False, and
        change nothing, if the memory cannot."""
        return False

    def score(self, ids: Ids, keep: slice | None = None) -> Scores: ...

    def generate(
        self,
        ids: Ids,
        max_new_tokens: int,
        *,
        stop: Sequence[int] = (),
        on_token: Callable[[Tensor], None] | None = None,
        seed: int | None = None,
        min_new_tokens: int = 0,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> list[Tensor]: ...


class BaseMemory(Memory, ABC):
    """The base of all memories: checks of inputs, scoring and generation."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.num_seen = 0
        self.batch = 0
        self.scope: hf.Scope | None = None
        self.broken = False  # a read failed halfway: some layers hold tokens that others lack

    @property
    def longest(self) -> int:
        """Tokens of the longest text held."""
        return self.num_seen

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the model in one thread at a time, and only under the method that this memory belongs to."""
        with hf.alone(self.lm.model):
            hf.check_scope(self.lm.model, self.scope)
            yield

    @contextmanager
    def _appending(self) -> Iterator[None]:
        """Mark the memory as broken if changing it is stopped by an error, lack of memory or Ctrl-C."""
        with self._alone():
            self.broken = True
            yield
            self.broken = False

    def _to_read(self, ids: Ids) -> Ids:
        ids = self._checked(ids, after=self.longest)
        if bool((ids < 0).any()):
            raise ValueError("a memory is read without padding: read rows of one length, and pad only scored rows")
        if self.batch and ids.shape[0] != self.batch:
            raise ValueError(
                f"this memory has {self.batch} rows; {ids.shape[0]} cannot be appended to it: append as many, or begin "
                "another memory"
            )
        return ids

    def _to_ask(self, ids: Ids) -> Tensor:
        """Return the ids as k groups of rows that continue the same memory: [k, batch, time]."""
        if self.num_seen == 0:
            raise ValueError("the memory is empty, so nothing predicts the first token: read at least a separator")
        ids = self._checked(ids, after=self.longest - 1)  # the last token is scored, never fed
        if ids.shape[0] % self.batch:
            raise ValueError(f"{ids.shape[0]} rows cannot be scored on a memory of {self.batch}: give a multiple of it")
        return ids.reshape(ids.shape[0] // self.batch, self.batch, ids.shape[1])

    def _to_continue(self, ids: Ids, max_new_tokens: int) -> Ids:
        """Return the ids, one row for each row of the memory. Positions for all new tokens must be left."""
        groups = self._to_ask(ids)
        if len(groups) != 1:
            raise ValueError(f"generate continues {self.batch} rows; {len(ids)} were given")
        if bool((ids < 0).any()):
            raise ValueError("generate continues rows without padding (-1): give rows of one length")
        check_new_tokens(self.lm, self.longest, ids.shape[1], max_new_tokens)
        return groups[0]

    def _checked(self, ids: Ids, *, after: int) -> Ids:
        if not self.lm.has_weights:
            raise ValueError(f"{self.lm.name} was loaded without weights, for plans: load it with them to read a text")
        if self.scope is not None:
            self.scope.check()
        if self.broken:
            raise ValueError("an earlier read of this memory failed halfway: read the text again into a new memory")
        check_ids(self.lm, ids)
        check_positions(self.lm, after + ids.shape[1])
        return ids.to(self.lm.device)

    @abstractmethod
    def fork(self) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Yield a function that feeds ids [batch, time] and returns the next token's logits [batch, vocabulary]."""

    @torch.no_grad()
    def score(self, ids: Ids, keep: slice | None = None) -> Scores:
        """Return nats[:, i] = -log p(ids[:, i] | memory, ids[:, :i]), i = 0 included, for the positions in `keep`.

        ids may have k·batch rows: row i continues row i % batch of the memory, whose keys are not copied.

        Raises:
            ValueError: an empty memory, a number of rows that does not divide, or too many tokens.
        """
        kept = range(*(keep or slice(None)).indices(ids.shape[1]))
        if kept.step != 1:
            raise ValueError(f"keep: got {keep}, expected contiguous positions. Leave out the step")
        with self._alone():
            groups = self._score_groups(self._to_ask(ids), kept)
        return Scores(torch.cat([g.nats for g in groups]), torch.cat([g.rank for g in groups]))

    def _score_groups(self, ids: Tensor, kept: range) -> list[Scores]:
        """Return the scores of groups of rows [groups, batch, time], each of which continues the memory."""
        return [self._score_group(group, kept) for group in ids]

    def _score_group(self, ids: Tensor, kept: range) -> Scores:
        """Return the scores of one group of rows [batch, time]."""
        parts = []
        with closing(self.predictions(ids, kept)) as predicted:  # restores the memory also after an error
            for targets, head in predicted:
                parts += list(scored(self.lm, targets, head))
        return joined(parts, ids)

    @abstractmethod
    def predictions(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        """Yield `(targets, head)` of rows [batch, time] in blocks, in order; `head(positions)` returns the logits that
        predict those targets. Closing the generator restores the memory."""

    @torch.no_grad()
    def generate(
        self,
        ids: Ids,
        max_new_tokens: int,
        *,
        stop: Sequence[int] = (),
        on_token: Callable[[Tensor], None] | None = None,
        seed: int | None = None,
        min_new_tokens: int = 0,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> list[Tensor]:
        """Return the new tokens after memory and ids [batch, time]: for each row [new], without the stop token.

        Greedy at temperature 0, else sampled from the smallest set of tokens that holds `top_p`. The memory does not
        change; `on_token` is called with each step's tokens [batch], -1 in finished rows.

        Raises:
            ValueError: an empty memory, another number of rows than its own, too many tokens, or a temperature, top_p
                or seed out of range.
            NotFiniteError: logits from which no token can be chosen.
        """
        check_sampling(temperature, top_p, seed)
        how = Sampling(max_new_tokens, min_new_tokens, tuple(stop), seed, temperature, top_p)
        return self._generate(self._to_continue(ids, max_new_tokens), how, on_token)

    def _generate(self, ids: Ids, how: Sampling, on_token: Callable[[Tensor], None] | None) -> list[Tensor]:
        """Return the new tokens after memory and ids, which were checked; see `generate`."""
        chosen: list[Tensor] = []
        with self._alone(), self.fork() as expect:
            logits = expect(ids)
            generator = None if how.seed is None else torch.Generator(logits.device).manual_seed(how.seed)
            done = torch.zeros(self.batch, dtype=torch.bool, device=logits.device)
            stops = torch.tensor(how.stop, dtype=torch.long, device=logits.device)
            while len(chosen) < how.max_new_tokens:
                if not bool(logits.amax(-1).isfinite().all()):  # a model may exclude single tokens with -inf
                    raise NotFiniteError(
                        f"{self.lm.name} gives logits that are not finite for new token {len(chosen) + 1}: its weights "
                        "are damaged, or its numbers overflow; try --dtype float32, or download the weights again"
                    )
                if len(chosen) < how.min_new_tokens:
                    logits[:, stops] = -torch.inf
                token = next_token(logits, how.temperature, how.top_p, generator)
                done |= torch.isin(token, stops)
                chosen.append(torch.where(done, -1, token))
                if on_token is not None:
                    on_token(chosen[-1])
                if bool(done.all()) or len(chosen) == how.max_new_tokens:
                    break
                logits = expect(token[:, None].to(self.lm.device))
        rows = torch.stack(chosen, 1) if chosen else ids.new_empty(self.batch, 0)
        return [row[row >= 0] for row in rows]
