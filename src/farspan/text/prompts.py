"""Convert texts to the tokens of a prompt, and back."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int


def encoded(tokenizer: Any, text: str) -> Int[np.ndarray, "time"]:
    """Return the token ids of a text, as `farspan.text.corpora.load` does: no special token is added, and the name of a
    special token in the text is tokenised as characters."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


def pieces(tokenizer: Any, *texts: str) -> list[np.ndarray]:
    """Return the token ids of the joined texts, one array per text.

    The texts are tokenised together because many tokenizers add a space at the beginning of their input. A token that
    spans two texts belongs to the second. The name of a special token in a text is tokenised as characters.
    """
    whole = encoded(tokenizer, "".join(texts))
    cuts = [0]
    for count in range(1, len(texts)):
        part = encoded(tokenizer, "".join(texts[:count]))
        shorter = min(len(part), len(whole))
        num_same = int(np.cumprod(part[:shorter] == whole[:shorter]).sum())  # from the first token on
        cuts.append(max(cuts[-1], num_same))
    return [np.array(whole[first:last], dtype=np.int64) for first, last in pairwise([*cuts, len(whole)])]


def continued(tokenizer: Any, *texts: str) -> list[np.ndarray]:
    """Return `pieces` of texts that follow another one: without the space that many tokenizers add at the beginning of
    their input. The text before them is the end of a line, or a word if they begin with white space of their own."""
    return pieces(tokenizer, "x" if texts[0][:1].isspace() else "\n", *texts)[1:]


def following(tokenizer: Any, text: str, *, before: str) -> np.ndarray:
    """Return the token ids that `text` adds after `before`."""
    return pieces(tokenizer, before, text)[1]


def decoded(tokenizer: Any, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
    """Return the text of token ids, with the spaces that some tokenizers would remove."""
    how = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode([int(one) for one in ids], **how))


@lru_cache(maxsize=1)  # decodes the whole vocabulary
def line_ends(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of all tokens that begin with a line end, also after spaces."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return tuple(token for token, text in enumerate(texts) if text.lstrip(" ").startswith("\n"))


def token_texts(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> list[str]:
    """Return the text that each token adds to those before it. Decoded alone, some lose their leading space. A
    character of several tokens is the text of the last of them."""
    texts: list[str] = []
    # Tokens are decoded after the last ones that end with a character: where byte tokens end within a character, some
    # tokenizers also decode the whole characters before it as replacement characters.
    begin = end = known = 0  # the first token that is decoded, the end of whole characters, characters of tokens before
    for now in range(1, len(ids) + 1):
        text = decoded(tokenizer, ids[begin:now])
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        texts.append(whole[known:])
        known = max(known, len(whole))
        if whole == text:
            begin, end = end, now
            known = len(decoded(tokenizer, ids[begin:end]))
    return texts
