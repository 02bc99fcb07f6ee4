"""Reading a text and asking about it: the protocols every method keeps, and the dense reader.

memory = reader.read(ids)         # once
memory.score(more)                # as often as you like: the memory is afterwards what it was before
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from farspan import hf
from farspan.attention import Attend, Eviction, SinkWindow
from farspan.lm import LM

Ids = Int[
    Tensor, "batch _"
]  # rows, each of one length (`_`: its own); -1 marks right padding, where a method allows it

Head = Callable[[slice], Tensor]  # some positions -> their logits [batch, positions, vocabulary] in float32

CHUNK = 1024  # tokens of one forward: bounds activations, and attention to [chunk, tokens read]
LOGITS_AT_ONCE = {"cpu": 1 << 22}  # values; the output head runs on blocks of this size, small ones on a CPU ...
LOGITS_AT_ONCE_ELSEWHERE = 1 << 25  # ... and large ones where each block reads the whole matrix from slow memory
LOWEST_TEMPERATURE = 1e-3  # logits divided by much less overflow in float32
CHECK_TEXT = (
    "The quick brown fox jumps over the lazy dog. A reader that reads a text in pieces has to arrive where a reader "
    "of the whole arrives: same words, same order, same expectations. Names help to see it: Ada, Grace, Alan, Kurt, "
    "Emmy, Srinivasa; and numbers do as well: 3, 14, 159, 2653, 58979. "
)


@dataclass
class Scores:
    """How well some tokens were expected, each given the memory and the tokens before it."""

    nats: Float[Tensor, "batch kept"]  # -log p(token); NaN at padding and where the model gave no numbers
    rank: Int[Tensor, "batch kept"]  # 0 = the greedy choice (of equal largest logits, the smallest id); otherwise the
    # number of tokens with a strictly larger logit, at least 1; -1 where nats is NaN


class NotFiniteError(ValueError):
    """A model gave logits from which no token can be chosen."""


@runtime_checkable
class Memory(Protocol):
    """What a reader keeps of the tokens it has read."""

    @property
    def num_seen(self) -> int: ...  # tokens read

    @property
    def num_kept(self) -> int: ...  # tokens still held, largest over layers

    @property
    def num_encoded(self) -> int:
        """Tokens read by an encoder instead of the decoder, as of the last question."""
        return 0

    @property
    def num_bytes(self) -> int: ...  # held for this memory

    def read(self, ids: Ids) -> None: ...

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


@runtime_checkable
class Reader(Protocol):
    """An LM under a method. Members with a body are defaults for classes that name `Reader` as their base."""

    lm: LM
    chunk: int  # tokens of one forward; a smaller one needs less memory
    capacity: int  # tokens a memory makes room for at once; 0 where it is not known how many will come

    @property
    def fallback(self) -> str | None:
        """Why the model is read with plain forwards, slower and without a cache; None where it is read in chunks."""
        return None

    @property
    def incremental(self) -> bool:
        """Whether a memory that was scored can be read further with the numbers of reading the whole text at once.
        Otherwise tasks read each longer text from its beginning."""
        return False

    @property
    def watchable(self) -> bool:
        """Whether the model's own attention reads the text as one sequence, so that its weights can be measured."""
        return False

    def flops(self, num_before: int, num_tokens: int, num_scored: int) -> float:
        """Return the multiplications and additions of one row that feeds `num_tokens` after `num_before` others, with
        the output head at `num_scored` positions."""
        return self.lm.flops(num_before, num_tokens, num_scored)

    def bytes_needed(self, num_rows: int, num_tokens: int) -> dict[str, int] | None:
        """Return the bytes for reading rows of up to `num_tokens`, by purpose, the model's `weights` among them and
        logits excluded; None: the keys that `Method.kept` counts are the best estimate."""
        return None

    def read(self, *passages: Ids, head: Ids | None = None, weights: Tensor | None = None) -> Memory: ...


@dataclass
class DenseReader(Reader):
    """Reads in chunks, with full attention unless a method brings another. Passages are joined; `weights` has no
    meaning here."""

    lm: LM
    chunk: int = CHUNK
    capacity: int = 0
    fallback: str | None = None
    attention: hf.Attention | None = None  # what a method has put in the place of full attention
    scope: hf.Scope | None = None  # outside of which what was read cannot be used
    incremental: ClassVar[bool] = True

    @property
    def watchable(self) -> bool:
        return self.attention is None

    def flops(self, num_before: int, num_tokens: int, num_scored: int) -> float:
        """As `Reader.flops`. Attention is computed over the whole rectangle of a chunk and the keys up to its end."""
        if self.fallback is not None:  # each question is one forward over everything
            return self.lm.flops(0, num_before + num_tokens, num_scored) if num_scored else 0.0
        sizes = [min(self.chunk, num_tokens - first) for first in range(0, num_tokens, self.chunk)]
        fed = (self.lm.flops(num_before + self.chunk * i, size, 0) for i, size in enumerate(sizes))
        return sum(fed) + self.lm.flops(0, 0, min(num_scored, num_tokens))

    def read(self, *passages: Ids, head: Ids | None = None, weights: Tensor | None = None) -> "BaseMemory":
        """Reads `head` and the passages, in order, each [batch, time] of one batch size.

        Raises:
            ValueError: padding, different batch sizes, or more tokens than the model has positions.
        """
        memory: BaseMemory
        if self.fallback:
            memory = PlainMemory(self.lm)
        elif self.attention is not None and self.attention.eviction is not None:
            memory = EvictingMemory(self.lm, self)
        else:
            memory = CachedMemory(self.lm, self)
        memory.scope = self.attention or self.scope
        for part in ([head] if head is not None else []) + list(passages):
            memory.read(part)
        return memory


@dataclass
class OuterReader(Reader):
    """A reader that reads with another one."""

    inner: DenseReader
    lm: LM = field(init=False)

    def __post_init__(self) -> None:
        self.lm = self.inner.lm

    @property
    def fallback(self) -> str | None:
        return self.inner.fallback

    @property
    def chunk(self) -> int:
        return self.inner.chunk

    @chunk.setter
    def chunk(self, num_tokens: int) -> None:
        self.inner.chunk = num_tokens

    def flops(self, num_before: int, num_tokens: int, num_scored: int) -> float:
        return self.inner.flops(num_before, num_tokens, num_scored)


def dense_reader(lm: LM) -> DenseReader:
    """The dense reader of `lm`, with plain forwards where the self-check finds that chunks change the answer."""
    return DenseReader(lm, fallback=_checked(lm))


@contextmanager
def attending(
    lm: LM,
    attend: Attend,
    *,
    name: str,
    rotary: bool = True,
    shape: SinkWindow | None = None,
    eviction: Eviction | None = None,
    padding: bool = False,
) -> Iterator[DenseReader]:
    """The dense reader of `lm`, whose attention is `attend` meanwhile; see `hf.replaced_attention`.

    Args:
        name: of the method, for what is refused.
        rotary: whether the method needs to know how each layer turns its queries and keys.
        shape: of caches that drop keys while a text is read.
        eviction: what chooses the keys that are kept once the text has been read.

    Raises:
        ValueError: a model that chunks mislead, whose attention cannot be replaced, or has been already.
    """
    with hf.alone(lm.model):
        if (reason := _checked(lm)) is not None:
            raise ValueError(f"{name} reads in chunks, which {lm.name} cannot be: {reason}; use full")
        layers = hf.attention_layers(lm.model, name=name, rotary=rotary)
    kinds: dict[str, Any] = {"shape": shape, "eviction": eviction, "padding": padding}
    with hf.replaced_attention(lm.model, attend, layers, name=name, reserved=True, **kinds) as attention:
        yield DenseReader(lm, attention=attention)


def read_alike(lm: LM, before: LM) -> None:
    """Has `lm` be read as the self-check found right for `before`, the same model at an earlier step."""
    _CHECKED[lm] = _checked(before)


def _checked(lm: LM) -> str | None:
    with hf.alone(lm.model):
        if lm not in _CHECKED:
            _CHECKED[lm] = self_check(lm)
    return _CHECKED[lm]


_CHECKED: WeakKeyDictionary[LM, str | None] = WeakKeyDictionary()
_BRANCHES: WeakKeyDictionary[LM, bool] = WeakKeyDictionary()
FEWEST_BRANCHES = 3  # two are as fast one after the other, and ask for no check


def _branches(lm: LM) -> bool:
    """Whether several continuations in one forward give what each gives by itself: some families make their positions
    or biases of a mask that they expect in another shape. Found out once, on a few tokens."""
    if lm not in _BRANCHES:
        ids = torch.tensor(lm.tokenizer(CHECK_TEXT, add_special_tokens=False, verbose=False)["input_ids"])
        ids = ids.to(lm.device)[None, : lm.position_limit]
        few = max(1, min(8, ids.shape[1] // 8))
        text, branches = ids[:, : -3 * few], ids[:, -3 * few :].reshape(3, 1, few)
        stream = hf.Stream(lm.model)
        difference = _Difference()
        with torch.no_grad():
            stream.step(text)
            try:
                snapshot = stream.snapshot()
                together = hf.logits(lm.model, stream.branch(branches)[:, 0], stream.output).float()
                stream.restore(snapshot)
                for branch, given in zip(branches, together, strict=True):
                    snapshot = stream.snapshot()
                    expected = hf.logits(lm.model, stream.step(branch), stream.output).float()
                    difference.add(expected, given[None])
                    stream.restore(snapshot)
            except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                _BRANCHES[lm] = False
                return False
        _BRANCHES[lm] = difference.problem(lm.dtype) is None
    return _BRANCHES[lm]


class BaseMemory(ABC):
    """What all memories share: checks of what comes in, scoring and generation."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.num_seen = 0
        self.batch = 0
        self.scope: hf.Scope | None = None
        self.broken = False  # a read failed halfway, so that some layers hold tokens that others lack

    @property
    @abstractmethod
    def num_kept(self) -> int: ...

    @property
    def num_encoded(self) -> int:
        return 0

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def read(self, ids: Ids) -> None: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is held."""
        return self.num_seen

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around what runs the model: one thread at a time, and under the method that this memory belongs to."""
        with hf.alone(self.lm.model):
            hf.check_scope(self.lm.model, self.scope)
            yield

    @contextmanager
    def _appending(self) -> Iterator[None]:
        """Around what changes the memory: after an error, a lack of memory or Ctrl-C it refuses to be used."""
        with self._alone():
            self.broken = True
            yield
            self.broken = False

    def _to_read(self, ids: Ids) -> Ids:
        ids = self._checked(ids, after=self.longest)
        if bool((ids < 0).any()):
            raise ValueError("a memory is read without padding: read rows of one length, and pad only what is scored")
        if self.batch and ids.shape[0] != self.batch:
            raise ValueError(f"this memory has {self.batch} rows; {ids.shape[0]} cannot be appended to it")
        return ids

    def _to_ask(self, ids: Ids) -> Tensor:
        """The ids as k groups of rows that go to the same memory: [k, batch, time]."""
        if self.num_seen == 0:
            raise ValueError("nothing was read yet, so nothing predicts the first token: read at least a separator")
        ids = self._checked(ids, after=self.longest - 1)  # the last token is asked for, never fed
        if ids.shape[0] % self.batch:
            raise ValueError(f"{ids.shape[0]} rows cannot be scored on a memory of {self.batch}: give a multiple of it")
        return ids.reshape(ids.shape[0] // self.batch, self.batch, ids.shape[1])

    def _checked(self, ids: Ids, *, after: int) -> Ids:
        if self.scope is not None:
            self.scope.check()
        if self.broken:
            raise ValueError("an earlier read of this memory failed halfway: read the text again into a new memory")
        if ids.dim() != 2 or ids.dtype != torch.long:
            raise ValueError(f"ids must be int64 of shape [batch, time], not {ids.dtype} {tuple(ids.shape)}")
        limit, end = self.lm.position_limit, after + ids.shape[1]
        if limit is not None and end > limit:
            raise ValueError(f"{self.lm.name} has {limit:,} positions; {end:,} tokens do not fit. Give a shorter text")
        return ids.to(self.lm.device)

    @abstractmethod
    def fork(self) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """A function that feeds ids [batch, time] and gives the next token's logits [batch, vocabulary]."""

    @torch.no_grad()
    def score(self, ids: Ids, keep: slice | None = None) -> Scores:
        """nats[:, i] = -log p(ids[:, i] | memory, ids[:, :i]), i = 0 included, for the positions in `keep`.

        ids may have k·batch rows: row i continues row i % batch of the memory, whose keys are not copied.

        Raises:
            ValueError: an empty memory, a number of rows that does not divide, or too many tokens.
        """
        kept = range(*(keep or slice(None)).indices(ids.shape[1]))
        if kept.step != 1:
            raise ValueError(f"keep = {keep} has a step; only contiguous positions can be kept")
        with self._alone():
            groups = self._score_groups(self._to_ask(ids), kept)
        return Scores(torch.cat([g.nats for g in groups]), torch.cat([g.rank for g in groups]))

    def _score_groups(self, ids: Tensor, kept: range) -> list[Scores]:
        """Scores of groups of rows [groups, batch, time], each of which continues the memory."""
        return [self._score_group(group, kept) for group in ids]

    def _score_group(self, ids: Tensor, kept: range) -> Scores:
        """Scores of one group of rows [batch, time]."""
        parts = []
        with closing(self.expectations(ids, kept)) as expected:  # also after an error the memory is as it was
            for targets, head in expected:
                parts += list(_scored(self.lm, targets, head))
        return _joined(parts, ids)

    @abstractmethod
    def expectations(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        """Of one group of rows [batch, time]: the targets at the kept positions, some at a time in order, and what
        gives the logits that expect them. Once it is closed the memory is what it was before."""

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
        """New tokens after memory and ids [batch, time], a tensor [new] for each row, without the stop token.

        Greedy at temperature 0, else sampled from the smallest set of tokens that holds `top_p`. The memory
        is afterwards what it was before; `on_token` is given each step's tokens [batch], -1 in finished rows.

        Raises:
            ValueError: an empty memory, another number of rows than its own, too many tokens, or a temperature or
                top_p out of range.
            NotFiniteError: logits from which no token can be chosen.
        """
        check_sampling(temperature, top_p)
        groups = self._to_ask(ids)
        if len(groups) != 1:
            raise ValueError(f"generate continues {self.batch} rows; {len(ids)} were given")
        chosen: list[Tensor] = []
        with self._alone(), self.fork() as expect:
            logits = expect(groups[0])
            generator = None if seed is None else torch.Generator(logits.device).manual_seed(seed)
            done = torch.zeros(self.batch, dtype=torch.bool, device=logits.device)
            stops = torch.tensor(list(stop), dtype=torch.long, device=logits.device)
            while len(chosen) < max_new_tokens:
                if not bool(logits.amax(-1).isfinite().all()):  # single tokens may be ruled out with -inf
                    raise NotFiniteError(
                        f"{self.lm.name} gives logits that are not finite for new token {len(chosen) + 1}: its weights "
                        "are damaged, or its numbers overflow; try --dtype float32, or download the weights again"
                    )
                if len(chosen) < min_new_tokens:
                    logits[:, stops] = -torch.inf
                token = _chosen(logits, temperature, top_p, generator)
                done |= torch.isin(token, stops)
                chosen.append(torch.where(done, -1, token))
                if on_token is not None:
                    on_token(chosen[-1])
                if bool(done.all()) or len(chosen) == max_new_tokens:
                    break
                logits = expect(token[:, None].to(self.lm.device))
        rows = torch.stack(chosen, 1) if chosen else ids.new_empty(self.batch, 0)
        return [row[row >= 0] for row in rows]


class CachedMemory(BaseMemory):
    """Keys and values, or a recurrent state, of what was read."""

    def __init__(self, lm: LM, reader: DenseReader) -> None:
        super().__init__(lm)
        self.reader = reader
        self.stream = hf.Stream(lm.model, reader.capacity, reader.attention)
        self.last: Tensor | None = None  # [batch, 1, hidden]: expects the first token to come

    @property
    def num_kept(self) -> int:
        return self.stream.num_kept

    @property
    def num_bytes(self) -> int:
        return self.stream.num_bytes

    @torch.no_grad()
    def read(self, ids: Ids) -> None:
        """Appends ids [batch, time].

        Raises:
            ValueError: padding, another batch size than before, or more tokens than the model has positions.
        """
        ids = self._to_read(ids)
        if ids.shape[1] == 0:
            return
        with self._appending():
            for _, hidden in self._steps(ids):
                self.last = hidden[:, -1:].clone()
        self.batch, self.num_seen = ids.shape[0], self.num_seen + ids.shape[1]

    def expectations(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        snapshot = self.stream.snapshot()
        try:
            if len(kept) and kept.start == 0:
                assert self.last is not None
                yield ids[:, :1], _head(self.lm, self.last, self.stream.output)
            # the last token is asked for, never fed; hidden state t expects token t + 1
            for first, hidden in self._steps(ids[:, : max(kept.stop - 1, 0)].clamp_min(0)):
                low = max(kept.start - 1 - first, 0)
                if low < hidden.shape[1]:
                    targets = ids[:, first + low + 1 : first + hidden.shape[1] + 1]
                    yield targets, _head(self.lm, hidden[:, low:], self.stream.output)
        finally:
            self.stream.restore(snapshot)

    def _score_groups(self, ids: Tensor, kept: range) -> list[Scores]:
        """As the groups one by one; in one forward for as many as make a chunk, where the model allows it."""
        fed = kept.stop - 1
        together = self.reader.chunk // max(fed, 1)
        worth = len(ids) >= FEWEST_BRANCHES and together > 1 and len(kept) > 0
        if not (worth and self.stream.can_branch and _branches(self.lm)):
            return super()._score_groups(ids, kept)
        return [scores for few in ids.split(together) for scores in self._score_branches(few, kept)]

    def _score_branches(self, ids: Tensor, kept: range) -> list[Scores]:
        count, batch, _ = ids.shape
        parts: list[list[Scores]] = [[] for _ in range(count)]
        if kept.start == 0:  # what expects a first token is the same for all
            assert self.last is not None
            logits = _head(self.lm, self.last, self.stream.output)(slice(None))
            for part, first in zip(parts, ids[:, :, :1], strict=True):
                part += _scored(self.lm, first, lambda _: logits)
        low = max(kept.start - 1, 0)
        if low < kept.stop - 1:
            snapshot = self.stream.snapshot()
            try:
                hidden = self.stream.branch(ids[:, :, : kept.stop - 1].clamp_min(0))[:, :, low:]
                targets = ids[:, :, low + 1 : kept.stop]
                rows = hidden.transpose(0, 1).reshape(batch, -1, hidden.shape[-1])
                head = _head(self.lm, rows, self.stream.output)
                scores = _joined(list(_scored(self.lm, targets.transpose(0, 1).reshape(batch, -1), head)), ids[0])
            finally:
                self.stream.restore(snapshot)
            time = targets.shape[2]
            each = zip(parts, scores.nats.split(time, 1), scores.rank.split(time, 1), strict=True)
            for part, nats, rank in each:
                part.append(Scores(nats, rank))
        return [_joined(part, ids[0]) for part in parts]

    @contextmanager
    def fork(self) -> Iterator[Callable[[Tensor], Tensor]]:
        snapshot = self.stream.snapshot()
        last = self.last

        def expect(ids: Tensor) -> Tensor:
            nonlocal last
            for _, hidden in self._steps(ids):
                last = hidden[:, -1:]
            assert last is not None
            return hf.logits(self.lm.model, last, self.stream.output)[:, -1].float()

        try:
            yield expect
        finally:
            self.stream.restore(snapshot)

    def _steps(self, ids: Ids) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, ids.shape[1], self.reader.chunk):
            yield first, self.stream.step(ids[:, first : first + self.reader.chunk])


class EvictingMemory(CachedMemory):
    """Keys and values of a text; from the first question on, those that the method's `Eviction` has chosen.

    The text is read with full attention. The first call of `score` or `generate` drops the other keys for good. To
    read further needs them again, so `read` then reads the whole text once more: scores depend on the text and on what
    is scored, never on earlier questions.
    """

    def __init__(self, lm: LM, reader: DenseReader) -> None:
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

    def expectations(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        self._evict()
        yield from super().expectations(ids, kept)

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
    """The tokens themselves: every question is one forward over all of them. For models that chunks mislead."""

    def __init__(self, lm: LM) -> None:
        super().__init__(lm)
        self.ids: Tensor | None = None

    @property
    def num_kept(self) -> int:
        return self.num_seen

    @property
    def num_bytes(self) -> int:
        return 0 if self.ids is None else self.ids.nbytes

    def read(self, ids: Ids) -> None:
        """Appends ids [batch, time]; as `CachedMemory.read`."""
        ids = self._to_read(ids)
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        self.batch, self.num_seen = ids.shape[0], self.ids.shape[1]

    def expectations(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        hidden, output = self._hidden(ids[:, : max(kept.stop - 1, 0)].clamp_min(0))
        wanted = hidden[:, self.num_seen - 1 + kept.start : self.num_seen - 1 + kept.stop]
        yield ids[:, kept.start : kept.stop], _head(self.lm, wanted, output)

    @contextmanager
    def fork(self) -> Iterator[Callable[[Tensor], Tensor]]:
        fed: list[Tensor] = []

        def expect(ids: Tensor) -> Tensor:
            fed.append(ids)
            hidden, output = self._hidden(torch.cat(fed, 1))
            return hf.logits(self.lm.model, hidden[:, -1:], output)[:, -1].float()

        yield expect

    def _hidden(self, ids: Tensor) -> tuple[Tensor, object]:
        assert self.ids is not None
        return hf.plain_hidden(self.lm.model, torch.cat([self.ids, ids], 1))


def self_check(lm: LM) -> str | None:
    """Why `lm` must be read with plain forwards, or None: chunks, one token and a fork against one plain forward.

    On two rows of about 300 tokens in the dtype of the run. In float32 the largest difference of logits must be below
    1e-3 of their spread; in lower precision 98 % of the likeliest tokens must agree and the mean KL divergence
    stay below 0.01 nats. transformers 5.23 gives other logits in chunks for Mamba-1, FalconMamba, Jamba,
    RecurrentGemma and Bamba, without an error.
    """
    if scaling := hf.length_dependent_rope(lm.model):
        return f"its RoPE scaling ({scaling}) turns with the length of the text, and cached keys do not follow"
    tokens = lm.tokenizer(CHECK_TEXT * 8, add_special_tokens=False, verbose=False)["input_ids"]
    length = min(300, len(tokens), lm.position_limit or 300)
    ids = torch.tensor([tokens[:length], tokens[:length][::-1]], device=lm.device)
    cut = length // 3
    with torch.no_grad():
        whole, output = hf.plain_hidden(lm.model, ids)
        few = ids[:, :16]
        own = lm.model(input_ids=few, use_cache=False).logits.float()
        if bool(own.isnan().any()):
            return None  # whatever reads it, the rows will say "nan"
        head = _Difference()
        head.add(own, hf.logits(lm.model, whole[:, : few.shape[1]], output).float().to(own.device))
        if problem := head.problem(lm.dtype):
            raise ValueError(
                f"{lm.name}: the output head does not give the model's own logits when it is run by itself; "
                f"this architecture cannot be read yet ({problem})"
            )
        try:
            stream = hf.Stream(lm.model)
            parts = [stream.step(ids[:, :cut])]
            snapshot = stream.snapshot()
            stream.step(ids.flip(1)[:, : cut + 7])  # a fork, which has to leave nothing behind
            stream.restore(snapshot)
            cuts = pairwise((cut, 2 * cut + 5, 2 * cut + 6, length))
            parts += [stream.step(ids[:, first:last]) for first, last in cuts]
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            return f"reading in chunks fails: {type(error).__name__}: {error}"
        chunked = torch.cat(parts, 1)
        difference = _Difference()
        block = max(1, logits_at_once(lm) // (2 * lm.vocabulary))
        for first in range(0, length, block):
            here = slice(first, first + block)
            expected = hf.logits(lm.model, whole[:, here], output).float()
            difference.add(expected, hf.logits(lm.model, chunked[:, here], stream.output).float())
    problem = difference.problem(lm.dtype)
    return problem and f"in chunks {problem}"


class _Difference:
    """How far two ways to the same logits [batch, time, vocabulary] are apart, added up over blocks."""

    def __init__(self) -> None:
        self.largest, self.spread, self.same, self.divergence, self.count = 0.0, 0.0, 0.0, 0.0, 0

    def add(self, expected: Tensor, given: Tensor) -> None:
        apart = (expected - given)[expected.isfinite()].abs()  # a family may rule tokens out with -inf
        self.largest = max(self.largest, float(apart.max().nan_to_num(torch.inf)))
        self.spread = max(self.spread, float(expected[expected.isfinite()].std()))
        self.same += float((expected.argmax(-1) == given.argmax(-1)).float().sum())
        log_p, log_q = expected.log_softmax(-1), given.log_softmax(-1)
        self.divergence += float((log_p.exp() * (log_p - log_q).nan_to_num(0.0)).sum())
        self.count += expected.shape[0] * expected.shape[1]

    def problem(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.float32:
            relative = self.largest / max(self.spread, 1e-9)
            return None if relative < 1e-3 else f"its logits differ by {relative:.2g} of their spread"
        agreement, divergence = self.same / self.count, self.divergence / self.count
        if (agreement >= 0.98 and divergence < 0.01) or (agreement >= 0.9 and divergence < 0.001):
            return None
        return f"{1 - agreement:.1%} of its likeliest tokens differ (KL divergence {divergence:.2g} nats)"


def logits_at_once(lm: LM) -> int:
    """Logits that are held at a time, over the rows of a batch."""
    return LOGITS_AT_ONCE.get(lm.device.type, LOGITS_AT_ONCE_ELSEWHERE)


def _head(lm: LM, hidden: Tensor, output: object) -> Head:
    return lambda positions: hf.logits(lm.model, hidden[:, positions], output).float()


def _scored(lm: LM, targets: Tensor, head: Head) -> Iterator[Scores]:
    """Scores of targets [batch, time], in blocks of positions."""
    block = max(1, logits_at_once(lm) // (targets.shape[0] * lm.vocabulary))
    for first in range(0, targets.shape[1], block):
        logits = head(slice(first, first + block))
        target = targets[:, first : first + block].to(logits.device)
        of_target = logits.gather(-1, target.clamp_min(0)[..., None])
        nats = (logits.logsumexp(-1) - of_target[..., 0]).masked_fill(target < 0, torch.nan)
        rank = (logits > of_target).sum(-1)
        # logits that were rounded to 16 bits tie; decoding takes the first of the largest, and so must a hit
        rank = torch.where((rank == 0) & (logits.argmax(-1) != target), 1, rank)
        yield Scores(nats, rank.masked_fill(nats.isnan(), -1))


def _joined(parts: list[Scores], ids: Tensor) -> Scores:
    if not parts:
        return Scores(torch.empty(ids.shape[0], 0, device=ids.device), ids.new_empty(ids.shape[0], 0))
    return Scores(torch.cat([p.nats for p in parts], 1), torch.cat([p.rank for p in parts], 1))


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise ValueError unless tokens can be sampled so."""
    if not (temperature == 0.0 or LOWEST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(
            f"temperature {temperature:g} cannot be sampled with: got {temperature:g}, expected 0 (the likeliest "
            f"token) or {LOWEST_TEMPERATURE:g} and more"
        )
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p {top_p:g} is no share of the probability: got {top_p:g}, expected above 0, at most 1")


def _chosen(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0.0:
        return logits.argmax(-1)
    probabilities, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    picked = torch.multinomial(probabilities.masked_fill(outside, 0.0), 1, generator=generator)
    return order.gather(-1, picked)[:, 0]
