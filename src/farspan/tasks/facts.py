"""Short texts inserted into a longer one at given depths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farspan.lm import LM
from farspan.text.prompts import token_texts

NEARBY = 16  # tokens before a place in which the beginning of a word is searched


@dataclass(frozen=True)
class Fact:
    """Tokens inserted into the context."""

    depth: float  # of the context: 0 its beginning, 1 its end
    ids: np.ndarray


def inserted(lm: LM, filler: np.ndarray, facts: Sequence[Fact]) -> tuple[np.ndarray, list[int]]:
    """Return the filler with the facts in it, and the index of the first token of each fact.

    The place of a fact is `round(depth * len(filler))`, or the last beginning of a word up to NEARBY tokens before it.
    Facts with the same place keep their order."""
    places = [_before_a_word(lm, filler, round(fact.depth * len(filler))) for fact in facts]
    parts, begins, done, total = [], [0] * len(facts), 0, 0
    for which in np.argsort(places, kind="stable"):
        parts += [filler[done : places[which]], facts[which].ids]
        begins[which] = total + places[which] - done
        done, total = places[which], begins[which] + len(facts[which].ids)
    return np.concatenate([*parts, filler[done:]]), begins


def _before_a_word(lm: LM, tokens: np.ndarray, place: int) -> int:
    """Return the largest index from `place - NEARBY` to `place` whose token begins with a blank, else `place`."""
    first = max(0, place - NEARBY)
    found = [i for i, text in enumerate(token_texts(lm.tokenizer, tokens[first : place + 1])) if text[:1].isspace()]
    return first + found[-1] if found else place
