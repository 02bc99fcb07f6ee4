"""Mentions: how much better a model predicts a name, an identifier or a number that the text mentions far before.

    gain = nats(mention | context in which other words replace the earlier mentions) - nats(mention | context)

A mention is the first occurrence of a word, with all its tokens, among the last `target_tokens` of a length. Its
nearest earlier occurrence is in the context, and the last token of that is at least `distance` tokens before it. The
words are found by their spelling alone:

`number`      two characters or more, with a digit
`identifier`  an underscore inside, or a capital after a small letter
`name`        three letters or more with an initial capital, at least once inside a sentence

and only if their letters occur in the window as this word and nowhere else: "The" is no name where there is "the" or
"other". So no longer word with the same letters is nearer than the earlier mention.

The control is the nats of the same tokens if they were the first mention. Its context has the same length and differs
only in the earlier occurrences of the words: each is replaced by another word of the same kind, with as many tokens,
that occurs elsewhere in the context. So a model that does not use tokens `distance` or more before the mention has a
gain of exactly 0 at every length, whatever else a longer context does for it. Two other controls do not have this
property: a context that is cut after the earlier mention also lacks the rest of the text and has smaller positions, and
the first mention in the text is in another sentence. The earlier mentions of all words are replaced in one text, so
each length is read twice. A mention is left out if words that were replaced for another one are within `distance` of
it; as few as possible are left out. A longer length has the same mentions, and those whose earlier one is further back.

The gain is the mean over the mentions of an example; the quality is the mean over examples. Windows without a mention
at the shortest length are left out.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from farspan.lengths import doubled_lengths
from farspan.lm import LM
from farspan.reader import Memory, Reader
from farspan.record import by_key
from farspan.specs import limited
from farspan.tasks.base import BoundText, Example, Parts, Quality, Result, Task, Work, digest, distinct, not_finite
from farspan.text.names import described
from farspan.text.prompts import decoded, token_texts

DISTANCE = 1000  # tokens
TARGET_TOKENS = 1024
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # any letter that was not read from a text
LETTER = rf"[\w{UNKNOWN}]"
WORD = re.compile(f"{LETTER}+")
INSIDE = re.compile(rf"(?:(?<=[\w,;)\]] )|(?<=[.(\[]))({LETTER}+)")  # a word that does not begin a sentence


@dataclass(frozen=True)
class Word:
    """An occurrence of a word in a window."""

    text: str
    kind: str
    first: int  # index of its first token
    end: int  # index of the token after it
    before: str  # characters of its first token that precede it
    whole: bool  # the window does not cut it, its tokens have all of its letters, and the last ends with it

    @property
    def form(self) -> tuple[str, str, int]:
        """Kind, characters before it and number of tokens, which a word that replaces it must share."""
        return self.kind, self.before, self.end - self.first


@dataclass(frozen=True)
class Mention:
    """A later mention, and the tokens that replace the earlier ones."""

    word: str
    first: int  # index of its first token in the window
    end: int  # index of the token after it
    earlier: int  # index of the first token of the nearest earlier mention
    replaced: tuple[tuple[int, np.ndarray], ...]  # index and new tokens of each earlier mention, in order

    @property
    def last(self) -> int:
        """The index of the last token that is replaced."""
        place, ids = self.replaced[-1]
        return place + len(ids) - 1


@dataclass(frozen=True)
class MentionText:
    """A window of the text with its later mentions."""

    tokens: np.ndarray
    mentions: tuple[Mention, ...]

    def at(self, length: int) -> list[Mention]:
        """Return the mentions whose nearest earlier mention is in the context of a length."""
        return [one for one in self.mentions if one.earlier >= len(self.tokens) - length]

    def without(self, length: int) -> np.ndarray:
        """Return the last `length` tokens, with the earlier mentions replaced."""
        tokens, begin = self.tokens.copy(), len(self.tokens) - length
        for one in self.at(length):
            for place, ids in one.replaced:
                tokens[place : place + len(ids)] = ids
        return tokens[begin:]


@dataclass(frozen=True)
class Mentions(Task):
    """Nats gained on words that recur after a long distance."""

    distance: int = limited(DISTANCE, 1)  # tokens from the nearest earlier mention, at least
    target_tokens: int = limited(TARGET_TOKENS, 1)  # at the end of each length, in which later mentions are scored

    name: ClassVar[str] = "mentions"
    quality: ClassVar[Quality] = Quality("gain", "nats gained per mention", higher_is_better=True)
    details: ClassVar[tuple[str, ...]] = ("nats", "control", "mentions")

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError unless every target has a context longer than the distance at all lengths."""
        if lengths[0] < self.least:
            raise ValueError(
                f"distance={self.distance} and target_tokens={self.target_tokens} do not fit into {lengths[0]:,} "
                f"tokens: give lengths from {self.least:,} on (--lengths), or a smaller distance (mentions:distance=N)"
            )

    @property
    def least(self) -> int:
        """The shortest length in which every target has a context longer than the distance."""
        return self.distance + self.target_tokens + 1

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return powers of two from the first that holds distance and targets to twice the largest trained length; at
        least that first one."""
        first = 1 << (self.least - 1).bit_length()
        return doubled_lengths(first, trained)

    def on(self, lm: LM, text: str) -> "BoundMentions":
        return BoundMentions.of(self, lm, text)


@dataclass(frozen=True, kw_only=True)
class BoundMentions(Mentions, BoundText[MentionText]):
    """Mentions in one text."""

    task: ClassVar[str] = "mentions"
    version: ClassVar[int] = 5

    @property
    def settings(self) -> dict[str, Any]:
        return {"distance": self.distance, "target_tokens": self.target_tokens, **self.text.named}

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[MentionText]]:
        """Return a window of the largest length for each repeat.

        Raises:
            ValueError: lengths too short for the distance, a text too short, or too few windows with a mention.
        """
        self.check(lengths)
        found: list[Example[MentionText]] = []
        done = 0
        for done, tokens in enumerate(self.text.every_window(lengths[-1], repeats, seed), 1):
            payload = self._marked(lm, tokens, np.random.default_rng([seed, done - 1]))
            if payload.at(lengths[0]):
                found.append(self._example(lm, payload, len(found), lengths))
            if len(found) == repeats:
                return distinct(found)
        raise ValueError(
            f"{described(self.text.name)}: {len(found)} of its {done:,} window{'' if done == 1 else 's'} of "
            f"{lengths[-1]:,} tokens have a name, identifier or number that recurs after {self.distance:,} tokens and "
            f"more within {lengths[0]:,}; {repeats} are needed: give a longer text, fewer repeats, a longer shortest "
            "length or a smaller distance (mentions:distance=N)"
        )

    def _example(self, lm: LM, payload: MentionText, repeat: int, lengths: Sequence[int]) -> Example[MentionText]:
        spans = [[one.first, one.end, one.earlier] for one in payload.mentions]
        changed = payload.without(len(payload.tokens))
        what = f"{self.task} {self.version} {self.distance} {self.target_tokens} {lm.separator.ids}"
        example = digest(what, payload.tokens, changed, np.array(spans).ravel())
        return Example(example, repeat, tuple(lengths), payload)

    def _marked(self, lm: LM, tokens: np.ndarray, rng: np.random.Generator) -> MentionText:
        """Return a window with its later mentions."""
        first = len(tokens) - self.target_tokens
        by_text = by_key((word.text, word) for word in words_of(lm, tokens))
        later = {text: pair for text, words in by_text.items() if (pair := self._later(words, first))}
        alone = (one for text, words in by_text.items() if text not in later for one in words)
        others = by_key((one.form, one) for one in alone if one.whole and one.end <= first)
        mentions = []
        for text, (before, mention) in later.items():
            earlier = [one for one in by_text[text] if one.first < mention.first]
            if not all(one.whole and one.form in others for one in earlier):
                continue
            # the same spelling is replaced by the same word; in order, as strings hash differently in each process
            forms = dict.fromkeys(one.form for one in earlier)
            chosen = {form: others[form][int(rng.integers(len(others[form])))] for form in forms}
            replaced = tuple(
                (one.first, tokens[chosen[one.form].first : chosen[one.form].end].copy()) for one in earlier
            )
            mentions.append(Mention(text, mention.first, mention.end, before.first, replaced))
        # the largest set of mentions that have none of its replaced words within `distance`
        apart = [
            [one for one in mentions if one.last <= last <= one.first - self.distance]
            for last in sorted({one.last for one in mentions})
        ]
        most: list[Mention] = max(apart, key=len) if apart else []
        return MentionText(tokens, tuple(most))

    def _later(self, words: Sequence[Word], first: int) -> tuple[Word, Word] | None:
        """Return the first occurrence of a word among the targets, which begin at `first`, after the one before it;
        None if there is none, if they are nearer than `distance`, or if the window or a token cuts it.

        Args:
            words: all occurrences of one word, in order.
        """
        for before, mention in pairwise(words):
            if mention.first >= first:
                far = before.end <= first and mention.first - (before.end - 1) >= self.distance
                return (before, mention) if far and mention.whole else None
        return None

    def work(self, lm: LM, example: Example[MentionText]) -> Iterator[Work]:
        for length in example.lengths:
            before = len(lm.separator.ids) + length - self.target_tokens
            for _ in range(2):
                yield Work(1, 0, before, 0)
                yield Work(1, before, self.target_tokens - 1, self.target_tokens)

    def run(self, reader: Reader, batch: Sequence[Example[MentionText]]) -> Iterator[Result]:
        """Yield results of a batch, shortest length first."""
        head = torch.tensor([reader.lm.separator.ids]).expand(len(batch), -1)
        for length in batch[0].lengths:
            whole = [example.payload.tokens[-length:] for example in batch]
            without = [example.payload.without(length) for example in batch]
            control, _ = self._nats(reader, without, head)
            nats, memory = self._nats(reader, whole, head)
            for index, example in enumerate(batch):
                scores, failed = self._judged(nats[index], control[index], example.payload, length)
                scores |= {"context": head.shape[1] + length}
                yield Result.of(example, length, memory, scores, failed)

    def _nats(self, reader: Reader, rows: Sequence[np.ndarray], head: Tensor) -> tuple[np.ndarray, Memory]:
        """Return the nats of the targets of rows, [rows, targets], and the memory that they were scored on."""
        text = torch.from_numpy(np.stack(rows)).long()
        first = text.shape[1] - self.target_tokens
        memory = reader.read(text[:, :first], head=head)
        return memory.score(text[:, first:]).nats.cpu().double().numpy(), memory

    def _judged(
        self, nats: np.ndarray, control: np.ndarray, payload: MentionText, length: int
    ) -> tuple[dict[str, Any], str]:
        """Return the scores of one example at one length, and the reason if it has none, else ""."""
        first, mentions = len(payload.tokens) - self.target_tokens, payload.at(length)
        spans = [slice(one.first - first, one.end - first) for one in mentions]
        if failed := sum(int((~np.isfinite(values[span])).sum()) for values in (nats, control) for span in spans):
            return {}, not_finite(failed)
        nats_each, control_each = (np.array([values[span].sum() for span in spans]) for values in (nats, control))
        return {
            "gain": float((control_each - nats_each).mean()),
            "nats": float(nats_each.mean()),
            "control": float(control_each.mean()),
            "mentions": len(mentions),
            "distance": float(np.mean([one.first - one.earlier for one in mentions])),
            "words": [one.word for one in mentions],
            "gains": (control_each - nats_each).tolist(),
        }, ""

    def parts(self, lm: LM, example: Example[MentionText], length: int) -> Parts:
        """Return the parts of the last mention."""
        tokens, last = example.payload.tokens, max(example.payload.at(length), key=lambda one: one.first)
        read = tokens[len(tokens) - length : last.first]
        asked = tokens[last.first : last.end]
        return [("separator", lm.separator.ids), ("read", read), ("asked", asked)], len(asked)


def words_of(lm: LM, tokens: np.ndarray) -> list[Word]:
    """Return the names, identifiers and numbers of a window whose letters occur only as this word, in order."""
    texts = token_texts(lm.tokenizer, tokens)
    ends = np.cumsum([len(text) for text in texts])
    text = "".join(texts)
    lowered, counts = text.lower(), Counter(WORD.findall(text))
    known = {word: count for word, count in counts.items() if kind_of(word) and UNKNOWN not in word}
    alone = {word for word, count in known.items() if lowered.count(word.lower()) == count}
    inside = {match[1] for match in INSIDE.finditer(text)}
    alone = {word for word in alone if kind_of(word) != "name" or word in inside}
    found = []
    for match in WORD.finditer(text):
        if match[0] in alone:
            first, last = (int(np.searchsorted(ends, place, "right")) for place in (match.start(), match.end() - 1))
            before = text[int(ends[first]) - len(texts[first]) : match.start()]
            whole = match.start() > 0 and match.end() < len(text) and int(ends[last]) == match.end()
            whole = whole and decoded(lm.tokenizer, tokens[first : last + 1]).strip() == (before + match[0]).strip()
            found.append(Word(match[0], kind_of(match[0]), first, last + 1, before, whole))
    return found


def kind_of(word: str) -> str:
    """Return "number", "identifier" or "name" by the spelling of a word, "" for other words."""
    if any(character.isdigit() for character in word):
        return "number" if len(word) > 1 else ""
    if "_" in word.strip("_") or any(one.islower() and other.isupper() for one, other in pairwise(word)):
        return "identifier"
    return "name" if len(word) > 2 and word[0].isupper() else ""
