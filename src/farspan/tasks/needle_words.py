"""The sentences and words of the task `needle`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from farspan.lm import LM
from farspan.text.prompts import following

FORMS = ("words", "numbers")  # of keys and values
LETTERS = 5  # of a variable, as in RULER
ADJECTIVES = (
    "ancient", "bitter", "blue", "bold", "brave", "bright", "calm", "clever", "cold", "dark", "deep", "dry",
    "early", "empty", "gentle", "golden", "green", "heavy", "hidden", "iron", "lonely", "loud", "lucky", "narrow",
    "noble", "old", "pale", "proud", "quiet", "red", "silver", "warm",
)  # fmt: skip
NOUNS = (
    "anchor", "apple", "arrow", "basket", "bell", "bird", "boat", "book", "bridge", "candle", "castle", "chair",
    "cloud", "coin", "crown", "desert", "door", "dragon", "engine", "feather", "field", "flower", "garden", "glass",
    "hammer", "harbor", "horse", "island", "kettle", "ladder", "mirror", "river",
)  # fmt: skip


@dataclass(frozen=True)
class Words:
    """The sentences of a kind, before their names are filled in."""

    description: str
    question: str
    answer: str  # the beginning of the answer


ONE = Words(
    "Magic {noun}s are hidden in the following text. Remember them: a question about them comes after it.\n\n",
    "What is the magic {noun} of {key}?",
    "The magic {noun} of {key} is",
)
SEVERAL = Words(ONE.description, "What are the magic {noun}s of {key}?", "The magic {noun}s of {key} are")
CHAIN = Words(
    "Assignments of variables are hidden in the following text. Remember them: a question about them comes after it."
    "\n\n",
    "Which variables have the value {key}?",
    "The variables with the value {key} are",
)
WORDS = {"single": ONE, "multikey": ONE, "multivalue": SEVERAL, "tracking": CHAIN}


class NeedleGroup(NamedTuple):
    """The needles that one question is about."""

    key: str  # that the question names
    sentences: list[str]
    answers: list[str]


def noun_of(form: str | None) -> str:
    """Return the noun for values of this form; None: a kind whose values are numbers."""
    return "word" if form == "words" else "number"


def needles(
    rng: np.random.Generator, lm: LM, count: int, each: int, forms: tuple[str, str], digits: int
) -> list[NeedleGroup]:
    """Return groups of needles, each about a key with `each` values.

    Args:
        forms: of keys and values.
        digits: of all numbers.

    Raises:
        ValueError: too few words or digits, or texts whose tokens are the same.
    """
    of_keys, of_values = forms
    if of_keys == of_values:  # no key is also a value
        sampled = _sampled(rng, of_keys, count * (1 + each), digits)
        keys, values = sampled[:count], sampled[count:]
    else:
        keys, values = _sampled(rng, of_keys, count, digits), _sampled(rng, of_values, count * each, digits)
    for name, form, texts in (("keys", of_keys, keys), ("values", of_values, values)):
        _check_apart(lm, f"{name} of form {form}", texts, f"choose {name}={FORMS[form == 'words']}")
    begin = f"{'A' if each > 1 else 'The'} magic {noun_of(of_values)} of"
    return [
        NeedleGroup(key, [f"{begin} {key} is {value}." for value in mine], mine)
        for key, mine in zip(keys, _cut(values, each), strict=True)
    ]


def chains(rng: np.random.Generator, lm: LM, count: int, hops: int, digits: int) -> list[NeedleGroup]:
    """Return chains of assignments, each of a value to a variable, and `hops` times of a variable to another; as
    `needles`."""
    values = _sampled(rng, "numbers", count, digits)
    names: dict[str, None] = {}
    while len(names) < count * (1 + hops):
        names["".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), LETTERS))] = None
    variables = list(names)
    hint = "use kind=single with values=words or values=numbers"
    _check_apart(lm, "variables", variables, hint)
    _check_apart(lm, "values of form numbers", values, hint)
    return [
        NeedleGroup(value, [f"VAR {mine[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(mine))], mine)
        for value, mine in zip(values, _cut(variables, 1 + hops), strict=True)
    ]


def _sampled(rng: np.random.Generator, form: str, count: int, digits: int) -> list[str]:
    """Return `count` different words or numbers."""
    lowest = 10 ** (digits - 1)
    there = len(ADJECTIVES) * len(NOUNS) if form == "words" else 9 * lowest
    if count > there:
        more = "give fewer" if form == "words" else f"digits = {digits} makes {there:,}: give more digits"
        raise ValueError(f"{count:,} different {form} are needed, for all depths and distractors; {more}")
    chosen = rng.choice(there, count, replace=False)
    if form == "numbers":
        return [str(lowest + int(one)) for one in chosen]
    return [f"{ADJECTIVES[one // len(NOUNS)]}-{NOUNS[one % len(NOUNS)]}" for one in chosen]


def _cut(texts: list[str], size: int) -> list[list[str]]:
    return [texts[first : first + size] for first in range(0, len(texts), size)]


def _check_apart(lm: LM, what: str, texts: Sequence[str], hint: str) -> None:
    """Raise ValueError if two texts have the same tokens, or one has the first tokens of another."""
    ids = sorted((following(lm.tokenizer, f" {text}", before="is").tolist(), text) for text in texts)
    for (one, first), (other, second) in pairwise([([], ""), *ids]):
        if not other or (one and other[: len(one)] == one):
            raise ValueError(
                f"{what} do not tokenise apart: {first!r} and {second!r} have the same tokens, or one has those of the "
                f"other's beginning, for the tokenizer of {lm.name}; {hint}"
            )
