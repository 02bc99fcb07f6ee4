"""Text to the tokens of a prompt."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


def pieces(tokenizer: Any, *texts: str) -> list[np.ndarray]:
    """The token ids of the texts joined, cut where they meet.

    Joined, because many tokenizers put a space before what they are given by itself. A token that spans two texts
    belongs to the second. Without special tokens, also where a text spells one.
    """
    whole = _ids(tokenizer, "".join(texts))
    cuts = [0]
    for count in range(1, len(texts)):
        part = _ids(tokenizer, "".join(texts[:count]))
        same = next(
            (i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole))
        )
        cuts.append(max(cuts[-1], same))
    return [np.array(whole[first:last], dtype=np.int64) for first, last in pairwise([*cuts, len(whole)])]


def behind(tokenizer: Any, text: str, *, before: str) -> np.ndarray:
    """The token ids that `text` adds where it stands behind `before`."""
    return pieces(tokenizer, before, text)[1]


def line_ends(tokenizer: Any) -> list[int]:
    """The tokens that begin with the end of a line."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return [token for token, text in enumerate(texts) if text.lstrip(" ").startswith("\n")]


def _ids(tokenizer: Any, text: str) -> Sequence[int]:
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
        "input_ids"
    ]
    return ids
