"""A model under a method: its test tokens, their scores, and comparisons of scores."""

from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.lm import LM
from farspan.methods import Method
from farspan.reader import Memory, Reader, dense_reader
from farspan.text.documents import read_texts
from farspan.text.utf8 import refuse_surrogates

LENGTH = 128  # tokens of most checks: read, appended and scored, 5 : 1 : 2
CHARACTERS = 20_000  # of the text
REACH = 160  # tokens that a token can reach back through all layers under a forgetful setting
EXACT = 2e-3  # nats, the largest difference in float32
ROUNDED, ROUNDED_LARGEST = 0.05, 0.25  # nats, the mean and the largest in lower precision
MISSING = 1e9  # nats; the difference between a number and NaN


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None  # None: it does not apply, for the reason in `note`
    measured: float | str
    allowed: str
    note: str  # one line


class Subject:
    """A model under a method, and its test tokens."""

    def __init__(self, lm: LM, method: Method, text: str | None) -> None:
        """Raises:
        ValueError: a text of too few tokens.
        """
        self.lm, self.method = lm, method
        tokens = _tokens(lm, text)
        self.longest = min(LENGTH, lm.position_limit or LENGTH, lm.trained_length or LENGTH)
        self.num_scored = self.longest // 4  # tokens scored
        self.before = self.longest - self.num_scored  # tokens before those
        self.query = self.longest // 8  # tokens of those, at most, appended after the rest was read
        self.rows = tokens[: 2 * self.longest].reshape(2, self.longest).clone()
        self.head = torch.tensor(lm.separator.ids, device=tokens.device)[: self.longest // 8]
        self.rows[:, : len(self.head)] = self.head
        self.known = tokens.unique()
        self.exact = lm.dtype in (torch.float32, torch.float64)
        self.expected = self.plain_nats(self.rows)  # scores of the rows by a plain forward
        self.rounding = 0.0  # nats by which full attention in chunks differs from `expected`, in lower precision
        if not self.exact:
            in_chunks = self.nats(dense_reader(lm), self.rows, 7)
            self.rounding = min(self.apart(in_chunks, self.expected), ROUNDED_LARGEST)
        self.noise = 0.0  # nats by which the method at its neutral setting differs from `expected`
        limit = method.neutral_limit(lm.trained_length)
        self.neutral_length = min(self.longest, max(1, LENGTH if limit is None else limit))
        # settings of the method: with small windows, equal to full attention, and with a bounded reach
        self.small = method.small(self.longest)
        self.neutral = method.neutral(self.neutral_length)
        self.forgetful = method.forgetful(max(2, REACH // lm.num_layers))

    def nats(self, reader: Reader, ids: Tensor, chunk: int = 1024, scored: int | None = None) -> Tensor:
        """Return -log p of the last tokens [rows, scored], read in chunks of `chunk`, scored in chunks of `scored`."""
        return self.score(reader, self.read(reader, ids, chunk), ids, scored or chunk)

    def read(self, reader: Reader, ids: Tensor, chunk: int = 1024) -> Memory:
        """Return a memory of all tokens but the scored ones."""
        reader.chunk = chunk
        before = ids.shape[1] - self._num_scored_of(ids)
        query = min(self.query, before // 2)  # appended after the rest was read, as passages need it
        memory = reader.read(ids[:, : before - query])
        memory.read(ids[:, before - query : before])
        return memory

    def score(self, reader: Reader, memory: Memory, ids: Tensor, chunk: int = 1024) -> Tensor:
        """Return -log p of the last tokens [rows, scored] after a memory of the tokens before them."""
        reader.chunk = chunk
        return memory.score(ids[:, -self._num_scored_of(ids) :]).nats.cpu()

    def plain_nats(self, ids: Tensor, num_scored: int | None = None) -> Tensor:
        """Return the same scores from one plain forward of the model."""
        num_scored = num_scored or self._num_scored_of(ids)
        with torch.no_grad():
            logits = self.lm.model(input_ids=ids, use_cache=False).logits
        return nats_of(logits[:, -num_scored - 1 : -1], ids[:, -num_scored:])

    def _num_scored_of(self, ids: Tensor) -> int:
        """Return the number of scored tokens at the end of these rows."""
        return min(self.num_scored, max(1, ids.shape[1] // 4))

    def sampled(self, rows: int, length: int, seed: int) -> Tensor:
        """Return tokens of the text in random order, [rows, length]."""
        generator = torch.Generator().manual_seed(seed)
        return self.known[torch.randint(len(self.known), (rows, length), generator=generator).to(self.known.device)]

    @property
    def kind(self) -> str:
        """The kind of difference compared."""
        return "largest" if self.exact else "mean"

    @property
    def tolerance(self) -> float:
        """The tolerance between forwards of different shapes, in nats."""
        return EXACT if self.exact else max(ROUNDED, 2 * self.rounding)

    @property
    def tolerance_of_one(self) -> float:
        """The tolerance between forwards of the same shapes, in nats."""
        return EXACT if self.exact else ROUNDED_LARGEST

    def apart(self, given: Tensor, expected: Tensor) -> float:
        """Return the difference between two computations of the same scores, in nats."""
        return largest(given, expected) if self.exact else float(_differences(given, expected).mean())

    def equal(self, name: str, variant: Method | None, apart: float, note: str, *, same_shapes: bool = False) -> Check:
        """Return the check that two forwards agree; `same_shapes`: `apart` is the largest difference."""
        tolerance, kind = (self.tolerance_of_one, "largest") if same_shapes else (self.tolerance, self.kind)
        allowed = f"<= {tolerance:.2g} nats, {kind}"
        return Check(name, apart <= tolerance, apart, allowed, note + self.tested(variant))

    def tested(self, variant: Method | None) -> str:
        """Return the addition to a note if a setting other than the method's own was tested."""
        return "" if variant is None or variant == self.method else f"; tested as {variant}"


def nats_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return -log p of ids [batch, time] under logits [batch, time, vocabulary]."""
    return -logits.float().log_softmax(-1).gather(-1, ids.to(logits.device)[..., None])[..., 0].cpu()


def largest(given: Tensor, expected: Tensor) -> float:
    """Return the largest difference; between a number and NaN it is MISSING."""
    return float(_differences(given, expected).max())


def _differences(given: Tensor, expected: Tensor) -> Tensor:
    return (given - expected).abs().nan_to_num(MISSING, MISSING)


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    line = " ".join(str(error).split())
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def beginning(name: str) -> str:
    """Return the first characters of the text of this name, over several documents.

    Raises:
        ValueError: there is no such text, or it has no documents, as `random`.
    """
    text = ""
    for document in read_texts(name):
        text += document + "\n"
        if len(text) >= CHARACTERS:
            break
    return text


def _tokens(lm: LM, text: str | None) -> Tensor:
    """Return tokens of the text, on the model's device."""
    if text is None:
        text = beginning("builtin")
    refuse_surrogates(text[:CHARACTERS], "the text")
    tokens = lm.tokenizer(text[:CHARACTERS], add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < 2 * LENGTH:
        raise ValueError(f"the text has {len(tokens)} tokens, and the checks read {2 * LENGTH}: give a longer one")
    return torch.tensor(tokens, device=lm.device)
