"""Is a method really doing what it says on this model? The promises of the methods, checked on a few hundred tokens.

Windows and the like are shrunk where a text would otherwise have to be long, and a check says so. In float32 the
largest difference between two ways to the same scores counts. In lower precision two forwards of other shapes
differ by rounding, so that there the mean counts; forwards of the same shapes are still compared by the largest.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from farspan import hf
from farspan.attention import SinkWindow, angles
from farspan.device import is_out_of_memory
from farspan.lm import LM
from farspan.methods import Composed, Full, Method, Replug, Rope
from farspan.methods.rope import plain, scaled
from farspan.reader import Memory, Reader
from farspan.text.documents import read_texts
from farspan.text.utf8 import refuse_surrogates

LENGTH = 128  # tokens of most checks: read, appended and scored, 5 : 1 : 2
REACH = 160  # tokens that a forgetting method may see back through all of its layers, in that check
STRING = 24  # random tokens that are to be copied
COPIES = 5  # texts with such a string
GAP = 4  # tokens between a string and its copy; of a copy also those that are not counted
CHARACTERS = 20_000  # of the text
EXACT = 2e-3  # nats, the largest difference in float32
ROUNDED, ROUNDED_LARGEST = 0.05, 0.25  # nats, the mean and the largest in lower precision
MISSING = 1e9  # nats; the difference between a number and none
AT_WORK = 1e-3  # nats; less than that is no difference
TROUBLE = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)  # what a model answers to what it cannot


@dataclass(frozen=True)
class Check:
    """One promise and what was found."""

    name: str
    passed: bool | None  # None: it does not apply, and `said` says why
    measured: float | str
    allowed: str
    said: str  # one line


Question = Callable[[Reader], Check]
Watch = Callable[[str, int, int], None]  # the check that begins, checks done, checks in all


class _Stop(Exception):  # noqa: N818
    """Leaves a method as an error would."""


def diagnose(lm: LM, method: Method, text: str | None = None, *, watch: Watch | None = None) -> list[Check]:
    """Checks that `method` does on `lm` what it says, in the model's own dtype.

    Args:
        text: of at least 256 tokens; default Python's own library.
        watch: told of each check before it begins.

    Returns:
        The checks in order. A method that cannot be put on the model is a single failed check, "runs".

    Raises:
        ValueError: a text that is too short.
    """
    patient = _Patient(lm, method, _tokens(lm, text))
    stages = patient.stages()
    total = sum(len(questions) for questions in stages.values()) + 1
    checks: list[Check] = []
    patient.expected = patient.plain_nats(patient.rows)  # also what a model makes at its first forward is then there
    patient.measure_rounding()
    before, logits = _state(lm), patient.plain_nats(patient.rows[:, :16], 1)

    def begins(name: str) -> None:
        if watch is not None:
            watch(name, len(checks), total)

    for number, (variant, questions) in enumerate(stages.items()):
        opened = False
        try:
            with variant.on(lm) as reader:
                opened = True
                for name, question in questions.items():
                    begins(name)
                    checks.append(patient.answer(name, question, reader))
                if number == len(stages) - 1:
                    raise _Stop  # what an error leaves behind is part of what is compared below
        except _Stop:
            pass
        except TROUBLE as error:
            if opened or is_out_of_memory(error):
                raise
            checks += [Check(name, False, "refused", "", _reason(error)) for name in questions]
            if variant == method:
                return checks[:1]
    begins("no trace")
    checks.append(_no_trace(before, _state(lm), torch.equal(logits, patient.plain_nats(patient.rows[:, :16], 1))))
    order = list(ORDER)
    return sorted(checks, key=lambda check: order.index(check.name))


ORDER = {
    "runs": "the method can be put on the model, which gives numbers",
    "no-op": "inside its window or at its neutral setting it is the model's own plain forward",
    "at work": "beyond that it is not",
    "cuts": "the result does not depend on how the text is cut",
    "causality": "a later token changes no earlier score",
    "rows": "the rows of a batch do not see each other",
    "right padding": "padding behind what is scored changes nothing",
    "left padding": "the model called by itself with a left-padded batch gives what its rows give, or refuses",
    "inv_freq": "RoPE frequencies are in float32, and those of the model's theta",
    "rope": "far positions are turned by the scaled frequencies",
    "context": "a random string is expected where it repeats one that the memory holds",
    "forgetting": "what is outside of what it keeps changes nothing",
    "memory": "it holds no more than it says",
    "no trace": "the model is left bit-identical, also after an error",
}


class _Patient:
    """A model under a method, and the tokens to look at it with."""

    def __init__(self, lm: LM, method: Method, tokens: Tensor) -> None:
        self.lm, self.method = lm, method
        self.parts: tuple[Any, ...] = getattr(method, "parts", (method,))
        longest = min(LENGTH, lm.position_limit or LENGTH, lm.trained_length or LENGTH)
        self.asked = longest // 4
        self.before = longest - self.asked  # tokens before those that are scored
        self.query = longest // 8  # of them at most, appended after the rest was read
        self.rows = tokens[: 2 * longest].reshape(2, longest).clone()
        head = torch.tensor(lm.separator.ids, device=tokens.device)[: longest // 8]
        self.head = head
        self.rows[:, : len(head)] = head
        self.known = tokens.unique()
        self.exact = lm.model.dtype in (torch.float32, torch.float64)
        self.expected = torch.empty(0)  # nats of the rows by a plain forward
        self.rounding = 0.0  # nats by which full attention in chunks of 7 differs from that, in lower precision
        self.noise = 0.0  # nats by which the method at its neutral setting differs from that

    def stages(self) -> dict[Method, dict[str, Question]]:
        """What is asked of the method as it is, and of smaller and neutral ones of its kind."""
        small, forgetful = _resized(self.method, self._small), self._forgetful()
        asked: list[tuple[Method, str, Question]] = [
            (self.method, "runs", self.runs),
            (self.method, "inv_freq", self.inv_freq),
            (self.method, "rope", self.rope),
            (self.method, "context", self.context),
            (_resized(self.method, self._neutral), "no-op", self.no_op),
            (small, "at work", self.at_work),
            (small, "cuts", self.cuts),
            (small, "causality", self.causality),
            (small, "rows", self.row_by_row),
            (small, "right padding", self.right_padding),
            (small, "left padding", self.left_padding),
            (small, "memory", self.memory),
            (forgetful or self.method, "forgetting", self.forgetting),
        ]
        stages: dict[Method, dict[str, Question]] = {}
        for variant, name, question in sorted(asked, key=lambda one: one[1] == "at work"):  # which needs the noise
            stages.setdefault(variant, {})[name] = question
        return stages

    # variants

    def _small(self, part: Any) -> Any:
        longest = self.before + self.asked
        sizes = {"window": longest // 5, "piece": longest // 5} | dict.fromkeys(
            ("k", "sinks", "stride", "tail"), longest // 16
        )
        changes = {name: size if value is None else min(value, size) for name, value, size in _sized(part, sizes)}
        if _dynamic(part):
            changes["original"] = min(part.original or self.lm.trained_length or longest, longest // 5)
        return replace(part, **changes) if changes else part

    def _neutral(self, part: Any) -> Any:
        length = self._neutral_length()
        changes: dict[str, Any] = {
            name: max(value, size) for name, value, size in _sized(part, {"window": length, "k": length})
        }
        changes |= {name: None for name, _, _ in _sized(part, {"piece": 0})}
        changes |= {name: 0 for name, _, _ in _sized(part, {"tail": 0})}
        if _dynamic(part):
            changes["original"] = max(part.original or self.lm.trained_length or length, length)
        else:
            changes |= {name: 1.0 for name, _, _ in _sized(part, {"factor": 0})}
        return replace(part, **changes) if changes else part

    def _neutral_length(self) -> int:
        """Tokens of a text that fits into a window as large as the model allows."""
        taken = max(getattr(part, "sinks", 0) + getattr(part, "stride", 0) for part in self.parts)
        trained = [self.lm.trained_length, *(p.original for p in self.parts if isinstance(p, Rope) and not _dynamic(p))]
        return min(self.before + self.asked, max(1, min((n - taken for n in trained if n), default=LENGTH)))

    def _forgetful(self) -> Method | None:
        """The method with a window that all layers together do not see far beyond; None where it keeps everything."""
        if not any(isinstance(part, SinkWindow) for part in self.parts):
            return None
        window = max(2, REACH // _num_layers(self.lm))

        def narrow(part: Any) -> Any:
            sizes = {"window": window, "sinks": 8, "stride": 2}
            changes = {name: min(value, size) for name, value, size in _sized(part, sizes)}
            return replace(part, **changes) if changes else part

        kept = tuple(narrow(part) for part in self.parts if not isinstance(part, Replug))
        return kept[0] if len(kept) == 1 else Composed(kept)

    def _tested(self, variant: Method) -> str:
        return "" if variant == self.method else f"; tested as {variant}"

    # how scores come about and are compared

    def nats(self, reader: Reader, ids: Tensor, chunk: int = 1024, scored: int | None = None) -> Tensor:
        """-log p of the last tokens [rows, asked], read in such chunks and scored in others."""
        return self._score(reader, self._read(reader, ids, chunk), ids, scored or chunk)

    def _read(self, reader: Reader, ids: Tensor, chunk: int = 1024) -> Memory:
        reader.chunk = chunk
        before = ids.shape[1] - self._asked_of(ids)
        query = min(self.query, before // 2)  # appended after the rest was read, as passages need it
        memory = reader.read(ids[:, : before - query])
        memory.read(ids[:, before - query : before])
        return memory

    def _asked_of(self, ids: Tensor) -> int:
        """Tokens at the end of such a text that are scored."""
        return min(self.asked, max(1, ids.shape[1] // 4))

    def _score(self, reader: Reader, memory: Memory, ids: Tensor, chunk: int = 1024) -> Tensor:
        reader.chunk = chunk
        return memory.score(ids[:, -self._asked_of(ids) :]).nats.cpu()

    def plain_nats(self, ids: Tensor, asked: int | None = None) -> Tensor:
        """The same by one plain forward of the model."""
        asked = asked or self._asked_of(ids)
        with torch.no_grad():
            logits = self.lm.model(input_ids=ids, use_cache=False).logits
        return _nats(logits[:, -asked - 1 : -1], ids[:, -asked:])

    def apart(self, given: Tensor, expected: Tensor) -> float:
        """How far two ways to the same scores are apart, nats."""
        return _largest(given, expected) if self.exact else float(_differences(given, expected).mean())

    def measure_rounding(self) -> None:
        if not self.exact:
            with Full().on(self.lm) as reader:
                given = self.nats(reader, self.rows, 7)
            self.rounding = min(self.apart(given, self.expected), ROUNDED_LARGEST)

    @property
    def tolerance(self) -> float:
        return EXACT if self.exact else max(ROUNDED, 2 * self.rounding)

    @property
    def tolerance_of_one(self) -> float:
        """Between forwards of the same shapes."""
        return EXACT if self.exact else ROUNDED_LARGEST

    def _equal(self, name: str, variant: Method | None, apart: float, said: str) -> Check:
        what = "largest" if self.exact else "mean"
        note = "" if variant is None else self._tested(variant)
        return Check(name, apart <= self.tolerance, apart, f"<= {self.tolerance:.2g} nats, {what}", said + note)

    def _equal_one(self, name: str, variant: Method, largest: float, said: str) -> Check:
        allowed = f"<= {self.tolerance_of_one:g} nats, largest"
        return Check(name, largest <= self.tolerance_of_one, largest, allowed, said + self._tested(variant))

    def answer(self, name: str, question: Question, reader: Reader) -> Check:
        try:
            return question(reader)
        except TROUBLE as error:
            if is_out_of_memory(error):
                raise
            return Check(name, False, "refused", "", _reason(error))

    # the questions

    def runs(self, reader: Reader) -> Check:
        nats = self.nats(reader, self.rows[:1])
        numbers = int(nats.isfinite().sum())
        fallback = getattr(reader, "fallback", None)
        said = f"reads with plain forwards, since {fallback}" if fallback else ORDER["runs"]
        return Check("runs", numbers == nats.numel(), f"{numbers} numbers", f"{nats.numel()} numbers", said)

    def no_op(self, reader: Reader) -> Check:
        variant = _resized(self.method, self._neutral)
        if variant == self.method and not any(isinstance(part, Full | SinkWindow) for part in self.parts):
            known = any(_sized(part, dict.fromkeys(("k", "factor", "piece", "original"), 0)) for part in self.parts)
            if not known:
                return Check("no-op", None, "", "", f"nothing is known of a neutral setting of {self.method}")
        length = self._neutral_length()
        expected = self.expected if length == self.rows.shape[1] else self.plain_nats(self.rows[:, :length])
        self.noise = self.apart(self.nats(reader, self.rows[:, :length]), expected)
        return self._equal("no-op", variant, self.noise, f"on {length} tokens it is the model's own plain forward")

    def at_work(self, reader: Reader) -> Check:
        small = _resized(self.method, self._small)
        if small == self.method == _resized(self.method, self._neutral):
            return Check("at work", None, "", "", f"{self.method} is the model as it is")
        apart = self.apart(self.nats(reader, self.rows), self.expected)
        needed = max(AT_WORK, 2 * self.noise)
        what = "largest" if self.exact else "mean"
        said = f"beyond its window, or with other frequencies, it differs from full{self._tested(small)}"
        return Check("at work", apart > needed, apart, f"> {needed:.2g} nats, {what}", said)

    def cuts(self, reader: Reader) -> Check:
        ids = self.rows[:1]
        whole = self.nats(reader, ids)
        apart = max(
            self.apart(self.nats(reader, ids, *chunks), whole) for chunks in ((7, None), (64, 1))
        )  # the last: scored token by token
        return self._equal(
            "cuts",
            _resized(self.method, self._small),
            apart,
            "chunks of 7, of 64 and one token at a time give what one pass gives",
        )

    def causality(self, reader: Reader) -> Check:
        ids, half = self.rows[:1], self.asked // 2
        later = ids.clone()
        later[:, -half:] = (later[:, -half:] + 1) % self.lm.vocabulary
        memory = self._read(reader, ids)
        given, changed = (self._score(reader, memory, one)[:, : self.asked - half] for one in (ids, later))
        return self._equal_one(
            "causality",
            _resized(self.method, self._small),
            _largest(changed, given),
            f"changing the last {half} tokens changes no score before them",
        )

    def row_by_row(self, reader: Reader) -> Check:
        together = self.nats(reader, self.rows)
        alone = torch.cat([self.nats(reader, self.rows[i : i + 1]) for i in range(2)])
        said = "two rows together are what each is alone"
        return self._equal("rows", _resized(self.method, self._small), self.apart(together, alone), said)

    def right_padding(self, reader: Reader) -> Check:
        memory = self._read(reader, self.rows)
        padded, real = self.rows.clone(), self.asked - self.asked // 3
        padded[0, self.before + real :] = -1
        given, expected = self._score(reader, memory, padded), self._score(reader, memory, self.rows)
        largest = max(_largest(given[0, :real], expected[0, :real]), _largest(given[1], expected[1]))
        if bool(given[0, real:].isfinite().any()):
            return Check("right padding", False, "numbers", "NaN", "padding is given a score")
        said = "rows of other lengths are scored as they are without padding"
        return self._equal_one("right padding", _resized(self.method, self._small), largest, said)

    def left_padding(self, reader: Reader) -> Check:
        small = _resized(self.method, self._small)
        if all(isinstance(part, Replug) for part in self.parts):
            said = f"{self.method} reads passages; the model called by itself knows of none"
            return Check("left padding", None, "", "", said)
        model, ids, padding = reader.lm.model, self.rows, self.asked // 2
        parameters = inspect.signature(model.forward).parameters
        if "attention_mask" not in parameters:
            return Check("left padding", None, "", "", f"{type(model).__name__} takes no attention mask")
        padded, mask = ids.clone(), torch.ones_like(ids)
        padded[0, padding:] = ids[0, : ids.shape[1] - padding]
        padded[0, :padding], mask[0, :padding] = self.lm.tokenizer.pad_token_id or 0, 0
        arguments = {"attention_mask": mask, "use_cache": False}
        if "position_ids" in parameters and self.lm.position_limit is not None:  # else only distances count
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        alone = torch.cat([self.plain_nats(one, self.asked) for one in (padded[:1, padding:], ids[1:])])
        try:
            with torch.no_grad():
                logits = model(input_ids=padded, **arguments).logits
        except ValueError as error:
            return Check("left padding", True, "refused", "equal or refused", _reason(error))
        together = _nats(logits[:, -self.asked - 1 : -1], padded[:, -self.asked :])
        said = "a left-padded batch through the model itself gives what its rows give"
        return self._equal("left padding", small, self.apart(together, alone), said)

    def inv_freq(self, reader: Reader) -> Check:
        found = list(_frequencies(reader.lm.model))
        if not found:
            return Check("inv_freq", None, "", "", f"{type(reader.lm.model).__name__} has no RoPE frequencies")
        others = {str(values.dtype).removeprefix("torch.") for _, values in found} - {"float32"}
        if others:
            said = "cast with the model: far positions are turned wrongly; load with dtype= instead of .to(dtype)"
            return Check("inv_freq", False, ", ".join(others), "float32", said)
        if any(isinstance(part, Rope) and not _dynamic(part) for part in self.parts):
            return Check("inv_freq", True, "float32", "float32", "the scaled frequencies are in float32")
        try:
            theta, own = hf.plain_rope(self.lm.model, name=str(self.method))
        except ValueError:
            own = found[0][1].to("meta")
        if own.device.type == "meta":
            said = "the frequencies are in float32; their values follow no plain theta that they could be compared with"
            return Check("inv_freq", True, "float32", "float32", said)
        error = float((own.cpu() / plain(theta, 2 * len(own)) - 1).abs().max())
        said = f"in float32, and those of theta = {theta:g} (rounded to bfloat16 they are off by 0.004)"
        return Check("inv_freq", error <= 1e-4, error, "<= 0.0001, relative", said)

    def rope(self, reader: Reader) -> Check:
        rope = next((part for part in self.parts if isinstance(part, Rope)), None)
        if rope is None:
            return Check("rope", None, "", "", f"{self.method} leaves RoPE as it is")
        if _dynamic(rope):
            said = "dynamic turns queries and keys inside attention; the model's own cosines stay"
            return Check("rope", None, "", "", said)
        theta, own = hf.plain_rope(self.lm.model, name=str(rope))
        original = rope.original or self.lm.trained_length
        assert original is not None
        wanted, scale = scaled(rope.type, theta, 2 * len(own), rope.factor, original)
        far = torch.tensor([1, original - 1, original, 2 * original + 1, int(rope.factor * original)])
        worst, change = 0.0, 0.0
        for name, _ in _frequencies(self.lm.model):
            module = self.lm.model.get_submodule(name.rpartition(".")[0])
            place = module.get_buffer(name.rpartition(".")[2]).device
            cosines, _ = module(torch.zeros(1, 1, device=place), far[None].to(place))
            here, pairs = cosines[0].float().cpu(), len(own)
            layouts = (here[:, :pairs], here[:, ::2])  # half and half; interleaved
            expected, unscaled = angles(far, wanted).cos() * scale, angles(far, plain(theta, 2 * pairs)).cos()
            worst = max(worst, min(_largest(one, expected) for one in layouts if one.shape == expected.shape))
            change = max(change, min(_largest(one, unscaled) for one in layouts if one.shape == unscaled.shape))
        said = f"cosines at positions up to {int(far.max()):,} are the formula's; unscaled ones differ by {change:.2g}"
        changed = change > 0.01 or rope.factor == 1.0
        if not changed:
            said = f"the cosines are still the model's own: the scaling of {rope} is ignored"
        return Check("rope", worst <= 1e-3 and changed, worst, "<= 0.001", said)

    def context(self, reader: Reader) -> Check:
        windows = [part.window for part in self.parts if isinstance(part, SinkWindow)]
        limit = min(LENGTH, self.lm.position_limit or LENGTH, self.lm.trained_length or LENGTH)
        string = min(STRING, (limit - 2 * GAP - len(self.head)) // 2, *(window - GAP - 2 for window in windows))
        if string <= GAP:
            return Check("context", None, "", "", f"{self.method} holds too few tokens for a string and its copy")
        lead, copied, other, gap = (self._drawn(COPIES, n, seed) for seed, n in enumerate((GAP, string, string, GAP)))
        head = self.head.expand(COPIES, -1)
        with_it, without = (torch.cat([head, lead, first, gap, copied], 1) for first in (copied, other))
        by_full = self._gain(*(self.plain_nats(ids, string) for ids in (with_it, without)))
        given = [self._string_nats(reader, ids, string) for ids in (with_it, without)]
        gain, error = self._gain(*given)
        allowed = "> 2 standard errors"
        measured = f"{gain:.2f} ± {error:.2f}"
        if _largest(*given) <= (self.tolerance_of_one if self.exact else 0.0):
            return Check("context", False, 0.0, allowed, "what was read changes nothing that is expected")
        if by_full[0] <= max(4 * by_full[1], 0.1):  # far beyond chance, or nothing could be told
            said = (
                f"what was read is seen, but the model does not copy with full attention either ({by_full[0]:.2f} nats)"
            )
            return Check("context", None, measured, allowed, said)
        said = f"nats per token that a copy of {string} random tokens is easier by ({by_full[0]:.2f} with full)"
        return Check("context", gain > 2 * error, measured, allowed, said)

    def _string_nats(self, reader: Reader, ids: Tensor, string: int) -> Tensor:
        reader.chunk = 1024
        memory = reader.read(ids[:, : -string - 2])
        memory.read(ids[:, -string - 2 : -string])
        return memory.score(ids[:, -string:]).nats.cpu()

    @staticmethod
    def _gain(with_it: Tensor, without: Tensor) -> tuple[float, float]:
        """By how many nats per token a copy is easier, and its standard error over texts."""
        each = (without - with_it)[:, GAP:].mean(-1)
        return float(each.mean()), float(each.std() / len(each) ** 0.5)

    def forgetting(self, reader: Reader) -> Check:
        variant = self._forgetful()
        if variant is None:
            return Check("forgetting", None, "", "", f"{self.method} keeps every token")
        shape = next(part for part in getattr(variant, "parts", (variant,)) if isinstance(part, SinkWindow))
        stride = getattr(shape, "stride", 1)
        reach = _num_layers(self.lm) * (shape.window - 1 + stride - 1) + 1
        sinks, gone = max(shape.sinks, 1), 12
        ids = self._drawn(1, sinks + gone + reach + self.asked, seed=5)
        changed = ids.clone()
        changed[:, sinks : sinks + gone] = self._drawn(1, gone, seed=6)
        given, other = (self.nats(reader, one) for one in (ids, changed))
        said = f"{gone} tokens that {_num_layers(self.lm)} layers of its window cannot reach change no score"
        return self._equal_one("forgetting", variant, _largest(other, given), said)

    def memory(self, reader: Reader) -> Check:
        small = _resized(self.method, self._small)
        parts = getattr(small, "parts", (small,))
        reader.chunk = 16
        memory = reader.read(self.rows)
        shape = next((part for part in parts if isinstance(part, SinkWindow)), None)
        pieces, again = 1, 0
        for part in parts:
            if isinstance(part, Replug) and part.piece is not None:
                pieces = max(1, -(-(self.rows.shape[1] - part.tail) // part.piece))
                again = (pieces - 1) * part.tail
        most = memory.num_seen + again
        measured = f"{memory.num_kept:,} tokens, {memory.num_bytes / 1024:,.1f} KiB"
        if shape is None:
            said = f"tokens held of {memory.num_seen:,} that were read{self._tested(small)}"
            return Check("memory", memory.num_kept <= most, measured, f"<= {most:,} tokens", said)
        most = min(most, pieces * (shape.sinks + shape.window - 1 + getattr(shape, "stride", 1) - 1))
        most_bytes = most * len(self.rows) * hf.key_bytes_per_token(self.lm.model)
        passed = memory.num_kept <= most and memory.num_bytes <= most_bytes
        said = f"held of {memory.num_seen:,} tokens in {len(self.rows)} rows{self._tested(small)}"
        return Check("memory", passed, measured, f"<= {most:,} tokens, {most_bytes / 1024:,.1f} KiB", said)

    def _drawn(self, rows: int, length: int, seed: int) -> Tensor:
        """Tokens of the text in random order."""
        generator = torch.Generator().manual_seed(seed)
        return self.known[torch.randint(len(self.known), (rows, length), generator=generator).to(self.known.device)]


def print_checks(checks: list[Check], title: str, console: Console) -> int:
    """The checks as a table; returns how many failed."""
    table = Table(title=title, title_justify="left")
    for column in ("", "check", "measured", "allowed", ""):
        table.add_column(column, overflow="fold")
    marks = {True: Text("✓", style="green"), False: Text("✗", style="red"), None: Text("–")}
    for check in checks:
        measured = check.measured if isinstance(check.measured, str) else f"{check.measured:.2g}"
        cells = (check.name, measured, check.allowed, check.said)
        table.add_row(marks[check.passed], *cells)
    console.print(table)
    failed = sum(check.passed is False for check in checks)
    applied = sum(check.passed is not None for check in checks)
    said = f"{applied - failed} of {applied} checks passed, {len(checks) - applied} do not apply"
    console.print(said, style="red" if failed else "green", highlight=False)
    return failed


def _tokens(lm: LM, text: str | None) -> Tensor:
    """Tokens of the text, on the model's device.

    Raises:
        ValueError: too few of them.
    """
    if text is None:
        text = beginning("builtin")
    refuse_surrogates(text[:CHARACTERS], "the text")
    tokens = lm.tokenizer(text[:CHARACTERS], add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < 2 * LENGTH:
        raise ValueError(f"the text has {len(tokens)} tokens, and the checks read {2 * LENGTH}: give a longer one")
    return torch.tensor(tokens, device=lm.device)


def beginning(name: str) -> str:
    """The first characters of a text that has this name for `farspan curve --text`, over several documents if need be.

    Raises:
        ValueError: there is no such text.
    """
    text = ""
    for document in read_texts(name):
        text += document + "\n"
        if len(text) >= CHARACTERS:
            break
    return text


def _resized(method: Method, change: Callable[[Any], Any]) -> Method:
    if isinstance(method, Composed):
        return Composed(tuple(change(part) for part in method.parts))
    changed: Method = change(method)
    return changed


def _sized(part: Any, sizes: dict[str, int]) -> list[tuple[str, Any, int]]:
    """Those settings of a method that are among `sizes`: name, value, size."""
    known = {field.name for field in fields(part)}
    return [(name, getattr(part, name), size) for name, size in sizes.items() if name in known]


def _dynamic(part: Any) -> bool:
    return isinstance(part, Rope) and part.type == "dynamic"


def _num_layers(lm: LM) -> int:
    return int(lm.model.config.get_text_config(decoder=True).num_hidden_layers)


def _frequencies(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, values in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            yield name, values


def _nats(logits: Tensor, ids: Tensor) -> Tensor:
    return -logits.float().log_softmax(-1).gather(-1, ids.to(logits.device)[..., None])[..., 0].cpu()


def _differences(given: Tensor, expected: Tensor) -> Tensor:
    return (given - expected).abs().nan_to_num(MISSING, MISSING)


def _largest(given: Tensor, expected: Tensor) -> float:
    return float(_differences(given, expected).max())


def _reason(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"


def _state(lm: LM) -> dict[str, Any]:
    """All that a method might leave behind, by name."""
    model = lm.model
    state: dict[str, Any] = {}
    for where, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for key, value in kind.items():
                if value is not None:
                    state[f"{where}.{key}"] = id(value), value.dtype, tuple(value.shape), _bits(value)
        state[f"{where} attributes"] = sorted(vars(module))
        state[f"{where} settings"] = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str)}
        state[f"{where} hooks"] = {k: len(v) for k, v in vars(module).items() if k.endswith("hooks") and v is not None}
    state["config"] = deepcopy(model.config.to_dict())
    state["attention implementation"] = model.config._attn_implementation
    state["attention functions"] = sorted(AttentionInterface().valid_keys())
    state["mask functions"] = sorted(AttentionMaskInterface().valid_keys())
    return state


def _bits(value: Tensor) -> int | None:
    """A sum over the bits of a tensor, which one that changed will hardly share; None for offloaded weights."""
    if value.device.type == "meta" or not value.numel():
        return None
    flat = value.detach().reshape(-1)
    aligned = flat.storage_offset() * flat.itemsize % 8 == 0 and flat.numel() * flat.itemsize % 8 == 0
    return int(flat.view(torch.int64 if aligned else torch.uint8).sum())


def _no_trace(before: dict[str, Any], after: dict[str, Any], same: bool) -> Check:
    moved = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    said = ORDER["no trace"]
    if moved:
        said = f"left changed: {', '.join(moved[:3])}{' and more' if len(moved) > 3 else ''}"
    elif not same:
        said = "the model's own expectations are not what they were, although its weights, hooks and config are"
    return Check("no trace", not moved and same, f"{len(moved)} changed", f"0 of {len(before):,}", said)
