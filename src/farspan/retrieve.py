"""How well passages fit a query: BM25 on words, or inner products of a sentence encoder."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from farspan.corpus import optional_import


def bm25(query: str, passages: Sequence[str]) -> list[float]:
    """A score for each passage, not negative: BM25 (k1 1.5, b 0.75) over the passages as the collection.

    Lower-cased words without English stop words, as bm25s cuts them. Needs the extra `retrieval`.
    """
    bm25s = optional_import("bm25s", "retrieval")

    def words(texts: list[str]) -> list[list[str]]:
        return bm25s.tokenize(texts, return_ids=False, show_progress=False)

    cut = words(list(passages))
    asked = words([query])[0]
    if not any(cut) or not asked:
        return [0.0] * len(cut)
    index = bm25s.BM25()
    index.index(cut, show_progress=False)
    return [float(score) for score in index.get_scores(asked)]


def dense(query: str, passages: Sequence[str], encoder: str) -> list[float]:
    """A score for each passage: the inner product of its vector and the query's.

    `encoder` is a sentence-transformers model, or any encoder of the hub, whose vectors are then means over tokens.
    Needs the extra `retrieval`.
    """
    vectors = _encoder(encoder).encode([query, *passages], show_progress_bar=False)
    return [float(score) for score in vectors[1:] @ vectors[0]]


@lru_cache(maxsize=1)
def _encoder(name: str) -> Any:
    try:
        return optional_import("sentence_transformers", "retrieval").SentenceTransformer(name)
    except OSError as error:
        raise ValueError(f"encoder {name!r} is neither a folder nor a model that can be loaded: {error}") from error
