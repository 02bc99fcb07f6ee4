"""Needles: sentences hidden at depths of the text, and queried after it.

Hsieh et al. 2024 (RULER), arXiv 2404.06654, whose tasks `niah` and `vt` these are, in words of our own:

`single`       "The magic number of {key} is {value}.", and the question is the value;
`multikey`     the same, among needles with other keys that are not queried (`distractors`);
`multivalue`   several needles of one key; the question is all of their values;
`tracking`     "VAR A = 12345", "VAR B = VAR A", ...: a chain of assignments; the question is which variables have the
               value.

The hay is the text of the measurement. A question has one depth, at which its sentence is inserted. Several sentences
are spread evenly over a share of the hay, `spread`, from `depth * (1 - spread)` on. A sentence is inserted before a
word, up to 16 tokens before its place.

`together` puts the needles of all depths into one text, each with its own key and value, so that one reading serves
all questions; each question then has the needles of the other depths as distractors. Without it every depth has a text
and a reading of its own, with no needles of other depths.

`ask` has two values. `forced`: the right answer is fed, and an answer is right if each of its tokens has the highest
probability given the ones before it; several answers are in the order of the text, with commas, which are not scored.
`generated`: greedy generation, in the model's chat template if it has one; an answer is right if the output contains it
as a word. A length is all tokens: separator or template, text, the longest question, and its answer or `new_tokens`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.ask import asked, template
from farspan.lengths import doubled_lengths
from farspan.lm import LM
from farspan.reader import Memory, NotFiniteError, Reader
from farspan.specs import choice, limited
from farspan.tasks.base import BoundText, Example, Parts, Quality, Result, Task, Work, digest, not_finite
from farspan.tasks.facts import Fact, inserted
from farspan.tasks.needle_words import FORMS, WORDS, NeedleGroup, chains, needles, noun_of
from farspan.tasks.passages import joined, places, row
from farspan.text.prompts import continued, encoded, following, pieces

FORMS_OF = {"keys": "words", "values": "numbers"}
DEFAULTS: dict[str, dict[str, Any]] = {  # by kind: the settings that have an effect on some kinds only
    "single": FORMS_OF,
    "multikey": FORMS_OF | {"distractors": 3},
    "multivalue": FORMS_OF | {"distractors": 0, "answers": 4, "spread": 0.2},
    "tracking": {"distractors": 0, "hops": 4, "spread": 0.2},
}
KINDS = tuple(DEFAULTS)
WAYS = ("forced", "generated")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DIGITS, MOST_DIGITS = 7, 15  # 7 are RULER's
NEW_TOKENS = 64
DAY = datetime(2024, 7, 26)  # for chat templates that write the date: a prompt must not depend on when it is measured


@dataclass(frozen=True)
class NeedleQuery:
    """The needles of one depth, and the question about them."""

    facts: tuple[Fact, ...]
    ids: np.ndarray  # the question, with the end of the chat template and the beginning of the answer
    answer: np.ndarray  # all right answers, with commas between them
    spans: tuple[tuple[int, int], ...]  # beginning and end of each right answer in `answer`
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class NeedlePrompt:
    """The parts of a prompt as tokens."""

    head: np.ndarray  # the separator, or the beginning of the chat template
    description: np.ndarray
    hay: np.ndarray
    queries: tuple[NeedleQuery, ...]  # one for each depth
    others: tuple[Fact, ...]  # distractors
    other_answers: tuple[str, ...]  # of these

    @property
    def named(self) -> Iterator[np.ndarray]:
        """Yield all tokens, for a hash."""
        facts = [fact for query in self.queries for fact in query.facts] + list(self.others)
        yield from (self.head, self.description, self.hay, *joined([fact.ids for fact in facts]))
        yield np.array([round(1e6 * fact.depth) for fact in facts])
        for query in self.queries:
            yield from (query.ids, query.answer)


@dataclass(frozen=True)
class Needle(Task):
    """Sentences hidden in the text and queried after it. A setting that is None has its default."""

    kind: str = choice(KINDS, "single")
    ask: str = choice(WAYS, "forced")
    depths: tuple[float, ...] = field(default=DEPTHS, metadata={"quiet": True})  # 0: beginning of the hay, 1: its end
    together: bool = field(default=True, metadata={"quiet": True})  # the needles of all depths are in one text
    keys: str | None = choice(FORMS, None)  # default: words
    values: str | None = choice(FORMS, None)  # default: numbers
    digits: int | None = limited(None, 1, MOST_DIGITS)  # of all numbers; default: 7
    # further keys or chains, at random depths; default: 3 for multikey, else 0
    distractors: int | None = limited(None, 0, 1000)
    answers: int | None = limited(None, 2, 100)  # values of one key; default: 4
    hops: int | None = limited(None, 1, 100)  # variables after the first; default: 4
    # share of the hay over which one question's sentences are spread; default: 0.2
    spread: float | None = limited(None, 0, 1)
    new_tokens: int | None = limited(None, 1, 100_000)  # at most, with ask=generated; default: 64

    name: ClassVar[str] = "needle"
    details: ClassVar[tuple[str, ...]] = ("exact", "token_hits", "others")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.depths or len(set(self.depths)) < len(self.depths):
            given = "+".join(f"{depth:g}" for depth in self.depths)
            raise ValueError(f"depths = {given}: got a depth twice or none, expected different ones such as 0+0.5+1")
        if wrong := [depth for depth in self.depths if not 0 <= depth <= 1]:
            raise ValueError(f"depth {wrong[0]:g} is outside the text: expected 0, its beginning, to 1, its end")
        for name in ("keys", "values", "distractors", "answers", "hops", "spread"):
            if getattr(self, name) is not None and name not in DEFAULTS[self.kind]:
                others = " or ".join(f"kind={kind}" for kind, its in DEFAULTS.items() if name in its)
                raise ValueError(f"{name} has no effect on kind={self.kind}: leave it out, or use {others}")
        if self.kind == "multikey" and self.distractors == 0:
            raise ValueError("distractors = 0: multikey needs at least 1; use kind=single")
        if self.digits is not None and "numbers" not in self.forms and self.kind != "tracking":
            raise ValueError("digits has no effect: neither keys nor values are numbers; leave it out")
        if self.new_tokens is not None and self.ask == "forced":
            raise ValueError("new_tokens has no effect on ask=forced, which generates nothing: leave it out")
        if self.used("spread") == 1 and len(self.depths) > 1:
            raise ValueError("spread = 1 leaves no depths to choose: give one (depths=0), or a smaller spread")

    @property
    def quality(self) -> Quality:
        graded = self.kind in ("multivalue", "tracking")
        return Quality("right", "right answers", higher_is_better=True, graded=graded)

    def used(self, name: str) -> Any:
        """Return a setting of DEFAULTS: the given value, else the kind's default; None where it has no effect."""
        given = getattr(self, name)
        return DEFAULTS[self.kind].get(name) if given is None else given

    @property
    def forms(self) -> tuple[str, str]:
        """The forms of keys and values."""
        return self.used("keys"), self.used("values")

    @property
    def num_digits(self) -> int:
        return DIGITS if self.digits is None else self.digits

    @property
    def num_new(self) -> int:
        """The most tokens that are generated; 0 with ask=forced."""
        return 0 if self.ask == "forced" else self.new_tokens or NEW_TOKENS

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return powers of two from a quarter of the smallest trained length to twice the largest, but at least 512, or
        1,024 where a depth has several needles."""
        first = max(1024 if self.used("spread") else 512, min(trained) // 4)
        return doubled_lengths(first, trained)

    def on(self, lm: LM, text: str) -> "BoundNeedle":
        return BoundNeedle.of(self, lm, text)


@dataclass(frozen=True, kw_only=True)
class BoundNeedle(Needle, BoundText[NeedlePrompt]):
    """Needles in one text."""

    task: ClassVar[str] = "needle"
    needs_nats: ClassVar[bool] = False
    reads_together: ClassVar[bool] = False
    version: ClassVar[int] = 2

    @property
    def settings(self) -> dict[str, Any]:
        used = {name: self.used(name) for name in DEFAULTS[self.kind]}
        used |= {"digits": self.num_digits, "depths": list(self.depths), "together": self.together}
        used |= {"new_tokens": self.num_new} if self.num_new else {}
        return {"kind": self.kind, "ask": self.ask, **used, **self.text.named}

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[NeedlePrompt]]:
        """Return a window of the text for each repeat, with the needles and question of each depth.

        Raises:
            ValueError: a text too short, lengths too short for the needles, needles whose tokens are the same, or too
                few words, digits or new tokens.
        """
        windows = self.text.windows(lengths[-1], repeats, seed)
        return [self._example(lm, window, tuple(lengths), repeat, seed) for repeat, window in enumerate(windows)]

    def _example(
        self, lm: LM, hay: np.ndarray, lengths: tuple[int, ...], repeat: int, seed: int
    ) -> Example[NeedlePrompt]:
        rng = np.random.default_rng([seed, repeat])
        groups = self._groups(rng, lm)
        queried = len(self.depths)
        depths = [*self.depths, *rng.random(len(groups) - queried).tolist()]
        placed = [self._placed(lm, one.sentences, depth) for depth, one in zip(depths, groups, strict=True)]
        words, noun, (head, end) = WORDS[self.kind], noun_of(self.used("values")), self._template(lm)
        queries = []
        for facts, one in zip(placed, groups[:queried], strict=False):
            question, beginning = (text.format(noun=noun, key=one.key) for text in (words.question, words.answer))
            queries.append(_query(lm, facts, question, beginning, one.answers, end))
        others = tuple(fact for facts in placed[queried:] for fact in facts)
        other_answers = tuple(answer for one in groups[queried:] for answer in one.answers)
        description = encoded(lm.tokenizer, words.description.format(noun=noun))
        prompt = NeedlePrompt(head, description, hay, tuple(queries), others, other_answers)
        self._check(lengths[0], prompt)
        what = f"{self.task} {self.version} {self.kind} {self.ask} {self.depths} {self.together} {seed} {repeat}"
        what += f" {self.num_new}" if self.num_new else ""
        return Example(digest(what, *prompt.named), repeat, lengths, prompt, self.depths)

    def _placed(self, lm: LM, sentences: Sequence[str], depth: float) -> tuple[Fact, ...]:
        """Return the sentences of one group of needles, spread from a depth on."""
        spread = self.used("spread") or 0.0
        depths = depth * (1 - spread) + np.linspace(0, spread, len(sentences))
        ids = [continued(lm.tokenizer, f"\n{sentence}\n")[0] for sentence in sentences]
        return tuple(Fact(float(at), one) for at, one in zip(depths, ids, strict=True))

    def _groups(self, rng: np.random.Generator, lm: LM) -> list[NeedleGroup]:
        """Return the needles of each depth, then the distractors."""
        count = len(self.depths) + (self.used("distractors") or 0)
        if self.kind == "tracking":
            return chains(rng, lm, count, self.used("hops"), self.num_digits)
        return needles(rng, lm, count, self.used("answers") or 1, self.forms, self.num_digits)

    def _template(self, lm: LM) -> tuple[np.ndarray, str | None]:
        """Return the tokens before the description, and the text after the question; None: no chat template."""
        if self.ask == "forced" or not getattr(lm.tokenizer, "chat_template", None):
            return np.array(lm.separator.ids), None
        before, between, after = template(lm, DAY)
        ids = lm.tokenizer(before, add_special_tokens=False)["input_ids"]
        return np.array(ids or lm.separator.ids, np.int64), between + after

    def chat(self, lm: LM) -> str | None:
        head, end = self._template(lm)
        return None if self.ask == "forced" else digest("" if end is None else end, head)

    def ends(self, lm: LM) -> list[int] | None:
        return lm.stop_tokens if self.num_new else None

    def _check(self, shortest: int, prompt: NeedlePrompt) -> None:
        """Raise ValueError if less than a quarter of the shortest length is hay, or an answer exceeds `new_tokens`."""
        fixed = shortest - min(self._hay(prompt, shortest, which) for which in range(len(prompt.queries)))
        if 4 * fixed > 3 * shortest:
            enough = -(-4 * fixed // 3 // 64) * 64  # rounded up: other examples take a few tokens more
            raise ValueError(
                f"a length of {shortest:,} tokens is too short: needles and question take {fixed:,}, more than three "
                f"quarters; give lengths from {enough:,} on (--lengths), fewer depths or fewer needles"
            )
        longest = max(len(query.answer) for query in prompt.queries)
        if 0 < self.num_new < longest:
            raise ValueError(f"new_tokens = {self.num_new}; the right answers have up to {longest:,} tokens: give more")

    def _facts(self, prompt: NeedlePrompt, which: int) -> list[Fact]:
        """Return the needles in the text for depth `which`, an index."""
        queries = prompt.queries if self.together else prompt.queries[which : which + 1]
        return [fact for query in queries for fact in query.facts] + list(prompt.others)

    def _hay(self, prompt: NeedlePrompt, length: int, which: int) -> int:
        """Return the number of hay tokens in the text for depth `which`, in a prompt of `length` tokens."""
        facts = sum(len(fact.ids) for fact in self._facts(prompt, which))
        return self._text(prompt, length) - len(prompt.head) - len(prompt.description) - facts

    def _text(self, prompt: NeedlePrompt, length: int) -> int:
        """Return the number of tokens before the question, in a prompt of `length` tokens."""
        return length - max(len(query.ids) + (self.num_new or len(query.answer)) for query in prompt.queries)

    def context(self, lm: LM, example: Example[NeedlePrompt], length: int, which: int) -> tuple[np.ndarray, int]:
        """Return the tokens between head and question for depth `which`, and the index of its first needle in them."""
        prompt = example.payload
        hay = prompt.hay[: self._hay(prompt, length, which)]
        text, begins = inserted(lm, hay, self._facts(prompt, which))
        first = which * len(prompt.queries[0].facts) if self.together else 0
        return np.concatenate([prompt.description, text]), len(prompt.description) + begins[first]

    def work(self, lm: LM, example: Example[NeedlePrompt]) -> Iterator[Work]:
        for length in example.lengths:
            text = self._text(example.payload, length)
            for which, query in enumerate(example.payload.queries):
                if which == 0 or not self.together:
                    yield Work(1, 0, text, 0)
                if self.ask == "forced":
                    yield Work(1, text, len(query.ids) + len(query.answer) - 1, len(query.answer))
                else:
                    yield Work(1, text, len(query.ids), 1)
                    yield from (Work(1, text + len(query.ids) + i, 1, 1) for i in range(self.num_new - 1))

    def run(self, reader: Reader, batch: Sequence[Example[NeedlePrompt]]) -> Iterator[Result]:
        """Yield results of examples read one by one."""
        for length in batch[0].lengths:
            for at_depth in zip(*(list(self._results(reader, one, length)) for one in batch), strict=True):
                yield from at_depth

    def _results(self, reader: Reader, example: Example[NeedlePrompt], length: int) -> Iterator[Result]:
        """Yield the results of one length, one for each depth in order."""
        lm, prompt = reader.lm, example.payload
        judged = self._forced if self.ask == "forced" else self._generated
        for which, (depth, query) in enumerate(zip(example.depths, prompt.queries, strict=True)):
            tokens, begin = self.context(lm, example, length, which)
            if which == 0 or not self.together:
                memory = reader.read(row(tokens), head=row(prompt.head))
            values, failed = judged(lm, memory, prompt, which)
            context = len(prompt.head) + len(tokens) + len(query.ids)
            values |= {"question": query.question, "answers": list(query.answers)}
            values |= {"context": context, "distance": len(tokens) - begin, **places(memory)}
            yield Result.of(example, length, memory, values, failed, depth)

    def _forced(self, lm: LM, memory: Memory, prompt: NeedlePrompt, which: int) -> tuple[dict[str, Any], str]:
        query = prompt.queries[which]
        scores = memory.score(row(np.concatenate([query.ids, query.answer])), slice(len(query.ids), None))
        scored = torch.tensor([place for span in query.spans for place in range(*span)], device=scores.rank.device)
        if failed := int(scores.failed[0, scored].sum()):
            return {}, not_finite(failed)
        hits, nats = (scores.rank[0] == 0).cpu().numpy(), float(scores.nats[0, scored].double().sum())
        right = [bool(hits[first:last].all()) for first, last in query.spans]
        values = _shares(right) | {"token_hits": float(hits[scored.cpu().numpy()].mean())}
        return values | ({"nats": nats} if np.isfinite(nats) else {}), ""

    def _generated(self, lm: LM, memory: Memory, prompt: NeedlePrompt, which: int) -> tuple[dict[str, Any], str]:
        query = prompt.queries[which]
        try:
            [new] = memory.generate(row(query.ids), self.num_new, stop=lm.stop_tokens)
        except NotFiniteError as error:
            return {}, str(error)
        prediction = lm.tokenizer.decode(new.tolist(), skip_special_tokens=True)
        others = prompt.queries if self.together else ()
        wrong = [answer for one in others if one is not query for answer in one.answers] + list(prompt.other_answers)
        values = _shares([_mentions(prediction, answer) for answer in query.answers])
        values |= {"others": sum(_mentions(prediction, answer) for answer in wrong)}
        return values | {"prediction": prediction, "new": len(new)}, ""

    def parts(self, lm: LM, example: Example[NeedlePrompt], length: int) -> Parts:
        """Return the parts at the first depth."""
        prompt, query = example.payload, example.payload.queries[0]
        read = "read", self.context(lm, example, length, 0)[0]
        last = "asked", np.concatenate([query.ids, query.answer])
        return [("separator", prompt.head), read, last], len(query.answer)


def _query(
    lm: LM, facts: tuple[Fact, ...], question: str, beginning: str, answers: Sequence[str], end: str | None
) -> NeedleQuery:
    """Return the query for these answers.

    Args:
        beginning: of the answer.
        end: of the chat template, between question and answer; None: no template.
    """
    listed = [part for answer in answers for part in (",", f" {answer}")][1:]
    if end is None:
        ids, *parts = continued(lm.tokenizer, f"\n\n{question} {beginning}", *listed)
    else:
        ids, *parts = (continued if end.endswith("\n") else pieces)(lm.tokenizer, beginning, *listed)
        ids = np.concatenate([asked(lm, "", f"\n\n{question}", end)[0].numpy(), ids])
    whole, ends = joined(parts)
    for text, part in zip(answers, parts[::2], strict=True):
        if part.tolist() != following(lm.tokenizer, f" {text}", before="is").tolist():
            raise ValueError(
                f"answer {text!r} does not tokenise apart from the text around it for the tokenizer of {lm.name}: its "
                "tokens differ from those it has alone; use values of the other form, or kind=single"
            )
    spans = tuple((int(last) - len(part), int(last)) for part, last in zip(parts, ends, strict=True))[::2]
    return NeedleQuery(facts, ids, whole, spans, question, tuple(answers))


def _shares(right: Sequence[bool]) -> dict[str, float]:
    """Return the share of right answers, and if there are several, whether all are right."""
    exact = {"exact": float(all(right))} if len(right) > 1 else {}
    return {"right": float(np.mean(right)), **exact}


def _mentions(prediction: str, answer: str) -> bool:
    """Return whether an output contains an answer that is no part of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prediction, re.IGNORECASE) is not None
