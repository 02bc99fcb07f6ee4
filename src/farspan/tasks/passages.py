"""What tasks with passages share: passages as tokens, their weights for a reader that mixes them, where they stood."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from farspan.reader import Memory
from farspan.spelling import closest
from farspan.tasks.prompts import encoded

PASSAGE_TOKENS = 256  # at most, of each passage: what CEPE's encoder was trained on
WEIGHTS = ("method", "retriever")


def check_weights(weights: str) -> None:
    """Raises ValueError unless the weights are among WEIGHTS."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r} are unknown{closest(weights, WEIGHTS)}; known are {', '.join(WEIGHTS)}")


def passage_ids(tokenizer: Any, text: str, most: int) -> Int[np.ndarray, "time"]:
    """Token ids of a passage and the blank line behind it, at most so many: what is too long loses its end."""
    return encoded(tokenizer, text.strip() + "\n\n")[:most]


def passage_weights(weights: str, scores: Sequence[float] | np.ndarray) -> Float[Tensor, "passages"] | None:
    """Softmax of the retriever's scores (Shi et al. 2023, arXiv 2301.12652, section 3.2); None: the method's own."""
    if weights == "method" or not len(scores):
        return None
    return torch.tensor(list(scores), dtype=torch.float32).softmax(-1)


def joined(pieces: Sequence[np.ndarray]) -> tuple[Int[np.ndarray, "total"], Int[np.ndarray, "pieces"]]:
    """Pieces as an example holds them: one behind the other, and where each ends."""
    whole = np.concatenate([np.empty(0, np.int64), *pieces]).astype(np.int64)
    return whole, np.cumsum([len(piece) for piece in pieces], dtype=np.int64)


def parted(whole: np.ndarray, ends: np.ndarray, count: int) -> list[Int[np.ndarray, "time"]]:
    """The first `count` of the pieces that `joined` joined."""
    return np.split(whole[: ends[count - 1]], ends[: count - 1]) if count else []


def places(memory: Memory) -> dict[str, int]:
    """For a row: the tokens that stood in the decoder, and those that an encoder read instead, when a memory was last
    asked. What is encoded is the last of several passages, or the beginning of a document."""
    return {"in_decoder": memory.num_seen - memory.num_encoded, "in_encoder": memory.num_encoded}


def row(ids: np.ndarray) -> Int[Tensor, "1 time"]:
    return torch.from_numpy(np.ascontiguousarray(ids)).long()[None]
