"""Shared by tasks with passages: their tokens, their weights for a mixture, and the numbers of tokens read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from farspan.reader import Memory
from farspan.text.prompts import encoded, following

PASSAGE_TOKENS = 256  # at most, of each passage: the trained length of CEPE's encoder
WEIGHTS = ("method", "retriever")


def ended_by_blank(tokenizer: Any, text: str) -> Int[np.ndarray, "time"]:
    """Return the token ids of a passage and the blank line that ends it."""
    return encoded(tokenizer, text.strip() + "\n\n")


def passage_ids(tokenizer: Any, text: str, most: int) -> Int[np.ndarray, "time"]:
    """Return the token ids of a passage and a blank line, at most `most`: a longer passage loses its end."""
    ids = ended_by_blank(tokenizer, text)
    if len(ids) <= most:
        return ids
    blank = following(tokenizer, "\n\n", before="x")[:most]
    return np.concatenate([ids[: most - len(blank)], blank])


def passage_weights(weights: str, scores: Sequence[float | None] | np.ndarray) -> Float[Tensor, "passages"] | None:
    """Return the softmax of the retriever's scores (Shi et al. 2023, arXiv 2301.12652, section 3.2); None: the method
    uses its own weights."""
    if weights == "method" or not len(scores):
        return None
    return torch.tensor(list(scores), dtype=torch.float32).softmax(-1)


def joined(pieces: Sequence[np.ndarray]) -> tuple[Int[np.ndarray, "total"], Int[np.ndarray, "pieces"]]:
    """Return the pieces concatenated, and the end of each, for the hash of an example."""
    whole = np.concatenate([np.empty(0, np.int64), *pieces]).astype(np.int64)
    return whole, np.cumsum([len(piece) for piece in pieces], dtype=np.int64)


def places(memory: Memory) -> dict[str, int]:
    """Return, for a row, the number of tokens in the decoder and of those that an encoder read instead, as of the last
    score. The encoder reads the last of several passages, or the beginning of a document."""
    return {"in_decoder": memory.num_seen - memory.num_encoded, "in_encoder": memory.num_encoded}


def row(ids: np.ndarray) -> Int[Tensor, "1 time"]:
    return torch.from_numpy(np.ascontiguousarray(ids)).long()[None]
