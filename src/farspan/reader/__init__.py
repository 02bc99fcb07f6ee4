"""Read a text and score continuations of it: the protocol of all methods, and the dense reader.

memory = reader.read(ids)         # once
memory.score(more)                # any number of times: the memory does not change
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import Tensor

from farspan import hf
from farspan.hf.attend import Attend, Eviction, SinkWindow
from farspan.hf.chunks import LOGITS_AT_ONCE, logits_at_once, self_check
from farspan.lm import LM
from farspan.reader.dense_memory import CachedMemory, EvictingMemory, PlainMemory
from farspan.reader.logits import Head, NotFiniteError, Scores, check_sampling
from farspan.reader.memory import BaseMemory, Ids, Memory

__all__ = [
    "CHUNK",
    "LOGITS_AT_ONCE",
    "TOKENS_AT_ONCE",
    "BaseMemory",
    "CachedMemory",
    "DenseReader",
    "Head",
    "Ids",
    "Memory",
    "NotFiniteError",
    "OuterReader",
    "Reader",
    "Scores",
    "Work",
    "attending",
    "check_sampling",
    "dense_reader",
    "in_one_call",
    "logits_at_once",
    "read_alike",
    "self_check",
]

CHUNK = 1024  # tokens of a row in one forward on a CPU: bounds activations, and attention to [chunk, tokens read]
TOKENS_AT_ONCE = 8192  # of one forward over all rows; of one row alone on a GPU, which smaller forwards leave idle


@dataclass(frozen=True)
class Work:
    """Tokens that rows feed after those already read; a plan adds them up."""

    num_rows: int
    num_before: int  # tokens each row has read before
    num_tokens: int  # tokens each row feeds
    num_scored: int  # positions of these that need the output head
    # tokens of each passage among those of a text that is read, in order; None: all but the head are one passage
    passages: tuple[int, ...] | None = None


@runtime_checkable
class Reader(Protocol):
    """An LM under a method. Members with a body are defaults for classes that inherit from `Reader`."""

    lm: LM
    chunk: int  # tokens of one forward; a smaller one needs less memory
    capacity: int  # tokens that a memory allocates for at once; 0: unknown
    on_read: Callable[[int], None] | None = None  # called after each forward of `read` with its number of tokens

    @property
    def fallback(self) -> str | None:
        """Why the model is read with plain forwards, slower and without a cache; None if it is read in chunks."""
        return None

    @property
    def incremental(self) -> bool:
        """Whether extending a scored memory gives the same results as reading the whole text at once. Not so where
        a text is cut into passes, which later tokens follow: tasks then read each longer text from its beginning, in
        one call."""
        return True

    @property
    def changes_only_before(self) -> bool:
        """Whether it changes only how the text before the scored tokens is read or kept. A text that is scored from its
        first token on is then read as under full attention."""
        return False

    @property
    def watchable(self) -> bool:
        """Whether the model's own attention reads the text as one sequence, so that its weights can be measured."""
        return False

    @property
    def gives_nats(self) -> bool:
        """Whether it returns the log-probability of every token, not only whether the model would choose it."""
        return True

    def usage(self, rows: int) -> dict[str, Any]:
        """Return the work of a server since the last call, divided by `rows`: requests, prompt tokens, cached tokens if
        it reports them, and the prefix of the requests' ids."""
        return {}

    def forwards(self, work: Iterable[Work], head: int) -> Iterable[Work]:
        """Return the work of one example as this reader runs it; the first `head` tokens of a text begin every pass."""
        return work

    def flops(self, num_before: int, num_tokens: int, num_scored: int) -> float:
        """Return the multiplications and additions of one row that feeds `num_tokens` after `num_before` others, with
        the output head at `num_scored` positions."""
        return self.lm.flops(num_before, num_tokens, num_scored)

    def bytes_needed(self, num_rows: int, num_tokens: int) -> dict[str, int] | None:
        """Return the bytes for reading rows of up to `num_tokens`, by purpose, including the model's `weights` but no
        logits; None: the keys that `Method.kept` counts are the best estimate."""
        return None

    def check_answers(self, passages: Sequence[Ids]) -> None:
        """Raise ValueError if a memory of these passages cannot generate before more text is read."""
        return

    def read(self, *passages: Ids, head: Ids | None = None, weights: Tensor | None = None) -> Memory: ...


@dataclass
class DenseReader(Reader):
    """Reads in chunks, with full attention unless a method replaces it. Passages are joined; `weights` is ignored."""

    lm: LM
    chunk: int = 0  # tokens of each row in one forward; default: TOKENS_AT_ONCE on NVIDIA GPUs, else CHUNK
    capacity: int = 0
    fallback: str | None = None
    attention: hf.CustomAttention | None = None  # of a method, instead of full attention
    scope: hf.Scope | None = None  # outside of it, its memories cannot be used
    on_read: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        # eager attention holds the scores of all pairs of a chunk
        is_small = self.lm.device.type != "cuda" or self.lm.model.config._attn_implementation == "eager"
        self.chunk = self.chunk or (CHUNK if is_small else TOKENS_AT_ONCE)

    @property
    def changes_only_before(self) -> bool:
        return self.attention is not None and self.attention.eviction is not None

    @property
    def watchable(self) -> bool:
        return self.attention is None

    def forwards(self, work: Iterable[Work], head: int) -> Iterable[Work]:
        if self.fallback is not None:  # each score is one forward over all tokens
            return [Work(w.num_rows, 0, w.num_before + w.num_tokens, w.num_scored) for w in work if w.num_scored]
        if self.attention is not None and self.attention.eviction is not None:
            return _evicting(work, self.attention.eviction)
        return work

    def flops(self, num_before: int, num_tokens: int, num_scored: int) -> float:
        """Return the operations as `Reader.flops`; attention covers all pairs of a chunk and the keys up to its end, or
        as many as the chunk's last query sees if a method drops the others."""
        shape = self.attention.shape if self.attention is not None else None
        total, end = self.lm.flops(0, 0, min(num_scored, num_tokens)), num_before + num_tokens
        for before in range(num_before, end, self.chunk):
            size = min(self.chunk, end - before)
            last = before + size - 1
            most = math.inf if shape is None else shape.sinks + last - shape.first_near(last) + 1
            total += self.lm.flops(before, size, 0, most)
        return total

    def read(self, *passages: Ids, head: Ids | None = None, weights: Tensor | None = None) -> "BaseMemory":
        """Read `head` and the passages, in order, each [batch, time] of one batch size.

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
    """A reader that wraps another reader."""

    inner: DenseReader
    lm: LM = field(init=False)

    def __post_init__(self) -> None:
        self.lm = self.inner.lm

    @property
    def on_read(self) -> Callable[[int], None] | None:
        return self.inner.on_read

    @on_read.setter
    def on_read(self, call: Callable[[int], None] | None) -> None:
        self.inner.on_read = call

    @property
    def fallback(self) -> str | None:
        return self.inner.fallback

    @property
    def chunk(self) -> int:
        return self.inner.chunk

    @chunk.setter
    def chunk(self, num_tokens: int) -> None:
        self.inner.chunk = num_tokens

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @capacity.setter
    def capacity(self, num_tokens: int) -> None:
        self.inner.capacity = self.inner_capacity(num_tokens)

    def inner_capacity(self, num_tokens: int) -> int:
        """Return the inner reader's capacity for a text of `num_tokens`, in tokens; 0: not known."""
        return num_tokens

    def flops(self, num_before: int, num_tokens: int, num_scored: int) -> float:
        return self.inner.flops(num_before, num_tokens, num_scored)


def _evicting(work: Iterable[Work], eviction: Eviction) -> Iterator[Work]:
    """Yield the work under an eviction: scores attend to the kept keys, and a text that grows is read again."""
    scored = False
    for one in work:
        if one.num_scored:
            one = replace(one, num_before=eviction.kept_to_answer(one.num_before))
        elif scored:
            one = replace(one, num_before=0, num_tokens=one.num_before + one.num_tokens)
        scored = one.num_scored > 0
        yield one


def in_one_call(work: Iterable[Work]) -> Iterator[Work]:
    """Yield the work of one example for a reader that is not incremental: each text is read from its beginning in one
    call."""
    text: Work | None = None  # that has been read last, and not yet scored
    for one in work:
        if one.num_scored and text is not None:
            yield replace(text, num_before=0, num_tokens=one.num_before)
        if one.num_scored:
            yield one
        text = None if one.num_scored else one


def dense_reader(lm: LM) -> DenseReader:
    """Return the dense reader of `lm`, with plain forwards if the self-check finds that chunks change the logits."""
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
    """Replace the attention of `lm` with `attend` and yield its dense reader; see `hf.replaced_attention`.

    Args:
        name: the method's, for error messages.
        rotary: whether the method needs the RoPE frequencies of each layer.
        shape: of caches that drop keys while a text is read.
        eviction: chooses the keys to keep after the text has been read.

    Raises:
        ValueError: a model that cannot be read in chunks, whose attention cannot be replaced or has been already, or
            whose cache does not hold the keys that an eviction chooses from.
    """
    with hf.alone(lm.model):
        if (reason := _checked(lm)) is not None:
            raise ValueError(f"{name} reads in chunks, which {lm.name} cannot be: {reason}; use full")
        layers = hf.attention_layers(lm.model, name=name, rotary=rotary)
        if eviction is not None:
            hf.check_cached_keys(lm.model, layers, name=name)
    kinds: dict[str, Any] = {"shape": shape, "eviction": eviction, "padding": padding}
    with hf.replaced_attention(lm.model, attend, layers, name=name, reserved=True, **kinds) as attention:
        yield DenseReader(lm, attention=attention)


def read_alike(lm: LM, before: LM) -> None:
    """Reuse the self-check of `before` for `lm`: the same model at an earlier step, or under other positions."""
    _CHECKED[lm] = _checked(before)


def _checked(lm: LM) -> str | None:
    with hf.alone(lm.model):
        if lm not in _CHECKED:
            _CHECKED[lm] = self_check(lm)
    return _CHECKED[lm]


_CHECKED: WeakKeyDictionary[LM, str | None] = WeakKeyDictionary()
