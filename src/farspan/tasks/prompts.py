"""Convert texts to the tokens of a prompt, and back."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int


def encoded(tokenizer: Any, text: str) -> Int[np.ndarray, "time"]:
    """Return the token ids of a text as `corpus.load` does: nothing is added, and nothing in it is a special token."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


def pieces(tokenizer: Any, *texts: str) -> list[np.ndarray]:
    """Return the token ids of the joined texts, one array per text.

    The texts are joined because many tokenizers add a space before a text of its own. A token that spans two texts
    belongs to the second. There are no special tokens, even if a text spells one.
    """
    whole = encoded(tokenizer, "".join(texts))
    cuts = [0]
    for count in range(1, len(texts)):
        part = encoded(tokenizer, "".join(texts[:count]))
        same = next(
            (i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole))
        )
        cuts.append(max(cuts[-1], same))
    return [np.array(whole[first:last], dtype=np.int64) for first, last in pairwise([*cuts, len(whole)])]


def following(tokenizer: Any, text: str, *, before: str) -> np.ndarray:
    """Return the token ids that `text` adds after `before`."""
    return pieces(tokenizer, before, text)[1]


@lru_cache(maxsize=1)  # decodes the whole vocabulary
def line_ends(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that begin with the end of a line."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return tuple(token for token, text in enumerate(texts) if text.lstrip(" ").startswith("\n"))


def stops(tokenizer: Any, *, one_line: bool) -> list[int]:
    """Return the tokens that end an answer: the end of text, and for answers of one line the ends of a line."""
    end = tokenizer.eos_token_id
    return ([] if end is None else [end]) + (list(line_ends(tokenizer)) if one_line else [])


def token_texts(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> list[str]:
    """Return the text that each token adds to the ones before it: alone, some tokenizers drop its leading space."""
    ids = [int(i) for i in ids]
    until = [tokenizer.decode(ids[max(0, n - 8) : n + 1]) for n in range(len(ids))]
    before = [tokenizer.decode(ids[max(0, n - 8) : n]) for n in range(len(ids))]
    return [text[len(known) :] for text, known in zip(until, before, strict=True)]
