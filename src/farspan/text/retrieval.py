"""Retrieval: scores of passages for a query, and an index of the passages of a user's documents.

    BM25(q, d) = Σ_{t in q} log(1 + (N - n_t + 1/2) / (n_t + 1/2)) · f / (f + k1 (1 - b + b |d| / mean |d|))

f: occurrences of term t in passage d, n_t: passages with it, N: passages; k1 1.5, b 0.75. Robertson and Zaragoza
2009, Foundations and Trends in Information Retrieval 3, section 3.4, in Lucene's form, as bm25s computes it. Terms are
lower-cased words of two or more letters (with the marks on them), digits or underscores, without English stop words; in
Chinese, Japanese, Thai, Lao, Khmer and Burmese, which write no spaces between words, each character is a term. Or
`dense`: inner products of a sentence encoder's vectors, by default Contriever's (Izacard et al. 2022, arXiv
2112.09118), as in CEPE (Yen et al. 2024, section 4).

An index is a folder, written under a temporary name and renamed, so that it is complete or missing. Opening it compares
its files with their checksums, once per process:

index.json       its documents and settings
passages.txt     the concatenated documents
starts.npy       [passages + 1]: the byte at which each passage begins, and the number of bytes
documents.npy    [passages]: the document of each passage
checksums.json   checksums of all these files
bm25/            bm25s's own files       or vectors.npy [passages, dim], or index.faiss

BM25's vocabulary and the graph of `faiss` are read into memory; all other files are memory-mapped. `dense` is exact and
compares with every vector; `faiss` searches a graph (HNSW; Malkov and Yashunin 2018, arXiv 1603.09320), which is faster
and not exact.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from farspan.extras import optional_import
from farspan.files import built, expanded, parse_json, remove_leftovers
from farspan.record import refuse_differences, refuse_file
from farspan.schema import check_index
from farspan.specs import check_known
from farspan.terminal import report
from farspan.text import checksums, encoders
from farspan.text.corpora import tokenizer_hash
from farspan.text.documents import read_texts

KINDS = ("bm25", "dense", "faiss")
ENCODER = "facebook/contriever"
WORDS = 100  # of a passage: the Wikipedia passages of Karpukhin et al. 2020, arXiv 2004.04906
FORMAT = 2  # incremented when the stored content changes, or the words of BM25
VECTORS_AT_ONCE = 1 << 14
NEIGHBOURS = 32  # of each vector in the graph of `faiss`
# scripts without spaces between words
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
SCRIPTS = 0x300, 0x10000  # characters among which combining marks are searched: later ones make patterns 5 times slower


@cache
def combining_marks() -> str:
    """Return the characters that belong to the letter before them, such as the vowels of Devanagari, which `\\w` does
    not match."""
    return "".join(one for one in map(chr, range(*SCRIPTS)) if unicodedata.category(one)[0] == "M")


@cache
def _pattern(more: str) -> str:
    """Return the pattern of a word: one character of a script without spaces, or letters, digits and underscores with
    the marks on them.

    Args:
        more: how often they follow the first one, `*` or `+`.
    """
    return rf"[{UNSPACED}]|[^\W{UNSPACED}](?:[^\W{UNSPACED}]|[{combining_marks()}]){more}"


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case. Each character of a script without spaces is one."""
    return re.findall(_pattern("*"), unicodedata.normalize("NFC", text.lower()))


def bm25(query: str, passages: Sequence[str]) -> list[float]:
    """Return the BM25 score of each passage, at least 0; `passages` are the collection. Needs the extra `retrieval`."""
    cut, terms = _words(list(passages)), _words([query])[0]
    if not any(cut) or not terms:
        return [0.0] * len(cut)
    index = optional_import("bm25s", "retrieval").BM25()
    index.index(cut, show_progress=False)
    return [float(score) for score in index.get_scores(terms)]


def dense(query: str, passages: Sequence[str], encoder: str) -> list[float]:
    """Return a score for each passage: the inner product of its vector and the query's.

    `encoder` is a sentence-transformers model, or any encoder of the hub, whose vectors are then means over tokens.
    Query and passages have the prompts that it has for them. Needs the extra `retrieval`.
    """
    model = encoders.encoder_named(encoder)
    scores = encoders.vectors_of(model, passages) @ encoders.vectors_of(model, [query], query=True)[0]
    return [float(score) for score in scores]


@dataclass(frozen=True)
class Index:
    """The passages of a user's documents. Made by `build`, opened by `open_index`."""

    folder: Path
    about: dict[str, Any]  # index.json

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def hash(self) -> str:
        """Hash of the documents and all settings: kind, passages, encoder with its weights."""
        # versions of transformers have other fields
        about = {name: value for name, value in self.about.items() if name != encoders.CONFIG}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def documents(self) -> Int[np.ndarray, "passages"]:
        """The index of each passage's document."""
        return np.load(self.folder / "documents.npy", mmap_mode="r")

    def passage(self, number: int) -> str:
        """Return the text of a passage, exactly as in its document."""
        return bytes(self._text[self._starts[number] : self._starts[number + 1]]).decode()

    def check(self) -> None:
        """Raise ValueError if a file is missing or is not as it was written."""
        try:
            checksums.verify(self.folder, "index.json", "passages.txt", "starts.npy", "documents.npy")
            starts, documents = self._starts, self.documents
        except (ValueError, OSError) as error:
            raise ValueError(f"{error}. {self._again}") from error
        numbers = starts.dtype.kind == documents.dtype.kind == "i"
        whole = numbers and starts.ndim == documents.ndim == 1 and len(starts) == len(documents) + 1 and not starts[0]
        if not whole or (np.diff(starts) < 0).any() or starts[-1] != (self.folder / "passages.txt").stat().st_size:
            raise ValueError(f"{self.folder} is damaged: starts.npy does not fit passages.txt. {self._again}")

    @property
    def _again(self) -> str:
        return f"Delete {self.folder} and build the index again with `farspan index`."

    def search(
        self, queries: Sequence[str], count: int
    ) -> tuple[Int[np.ndarray, "queries count"], Float[np.ndarray, "queries count"]]:
        """Return the best passages for each query, best first, and their scores. Passages of equal scores are in the
        order of the index, except with `faiss`.

        Raises:
            ValueError: a count below 1, more passages than there are or than the graph of `faiss` leads to, or an
                encoder that cannot be loaded.
        """
        if not 0 < count <= len(self):
            raise ValueError(f"{count:,} passages of {self.folder} were requested; it holds {len(self):,}")
        if self.about["kind"] == "bm25":
            none = np.zeros(len(self), np.float32)
            terms = _words(list(queries))
            found = [_best(self._bm25.get_scores(words) if words else none, count) for words in terms]
        else:
            vectors = encoders.vectors_of(encoders.encoder_named(self.about["encoder"]), queries, query=True)
            if self.about["kind"] == "faiss":
                scores, numbers = self._graph.search(vectors, count)
                if (numbers < 0).any():
                    raise ValueError(
                        f"the graph of {self.folder} does not lead to {count:,} passages: request fewer, or build an "
                        "index that compares with all (--kind dense)"
                    )
                return numbers.astype(np.int64), scores.astype(np.float32)
            found = self._nearest(vectors, count)
        return np.stack([numbers for numbers, _ in found]), np.stack([scores for _, scores in found])

    def _nearest(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        vectors = np.load(self.folder / "vectors.npy", mmap_mode="r")
        none = np.empty(0, np.int64), np.empty(0, np.float32)
        found = [none] * len(queries)
        for first in range(0, len(vectors), VECTORS_AT_ONCE):
            block = queries @ vectors[first : first + VECTORS_AT_ONCE].T
            for row, more in enumerate(block):
                numbers = np.r_[found[row][0], first : first + len(more)]
                scores = np.r_[found[row][1], more]
                order, kept = _best(scores, min(count, len(scores)))
                found[row] = numbers[order], kept
        return found

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.load(self.folder / "starts.npy", mmap_mode="r")

    @cached_property
    def _text(self) -> np.ndarray:
        return np.memmap(self.folder / "passages.txt", np.uint8, "r")

    @cached_property
    def _graph(self) -> Any:
        return optional_import("faiss", "faiss").read_index(str(self.folder / "index.faiss"))

    @cached_property
    def _bm25(self) -> Any:
        return optional_import("bm25s", "retrieval").BM25.load(self.folder / "bm25", mmap=True)


def build(
    text: str,
    out: str | Path,
    *,
    kind: str = "bm25",
    words: int = WORDS,
    tokens: int | None = None,
    tokenizer: Any = None,
    encoder: str = ENCODER,
) -> Index:
    """Build the index of a text, named as in `farspan.text.documents`, in the folder `out`.

    An existing index is opened instead, if it was made of the same documents with the same settings.

    Args:
        kind: one of KINDS.
        words: per passage; the last one of a document may have fewer.
        tokens: per passage, instead of words; needs a fast `tokenizer`.
        encoder: for dense and faiss.

    Raises:
        ValueError: an impossible setting, no documents, a folder with other files or with an index of other documents
            or settings, or an extra that is not installed.
    """
    check_known("kind", kind, KINDS)
    if words < 1 or (tokens is not None and tokens < 1):
        raise ValueError(f"passages of {words if tokens is None else tokens} words or tokens: expected at least 1")
    if tokens is not None and not getattr(tokenizer, "is_fast", False):
        raise ValueError("passages of tokens need a tokenizer that returns the place of each token: give a fast one")
    out = expanded(out)
    refuse_file(out)
    documents = list(read_texts(text))
    about = {
        "format": FORMAT,
        "kind": kind,
        "documents": len(documents),
        "text_hash": _text_hash(documents),
        "cut": {"words": words} if tokens is None else {"tokens": tokens, "tokenizer": tokenizer_hash(tokenizer)},
        "encoder": None if kind == "bm25" else encoder,
    }
    if (out / "index.json").exists():
        remove_leftovers(out.parent)  # of a command that was killed after it had renamed the index
        return _opened(out, text, about)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no index (no index.json): choose another folder (out)")
    cut = [_cut(document, words, tokens, tokenizer) for document in documents]
    passages = [piece for pieces in cut for piece in pieces]
    with built(out) as folder:
        with (folder / "passages.txt").open("wb") as file:
            sizes = [file.write(piece.encode()) for piece in passages]
        np.save(folder / "starts.npy", np.cumsum([0, *sizes], dtype=np.int64))
        np.save(folder / "documents.npy", np.repeat(np.arange(len(cut), dtype=np.int32), [len(one) for one in cut]))
        del sizes, documents, cut  # a gigabyte for a million passages
        if kind == "bm25":
            _write_bm25(folder, passages, text)
        else:
            _write_vectors(folder, passages, encoder, kind)
        record = {} if kind == "bm25" else encoders.record_of(encoders.encoder_named(encoder))
        (folder / "index.json").write_text(json.dumps(about | record, indent=2) + "\n")
        checksums.seal(folder)
    return _opened(out, text, about)  # perhaps written by another process


def _opened(out: Path, text: str, about: dict[str, Any]) -> Index:
    """Return the index in a folder."""
    found = open_index(out)
    if found.about.get("text_hash") != about["text_hash"]:
        raise ValueError(
            f"{out} holds an index of other documents: {found.about['documents']:,}, not the {about['documents']:,} of "
            f"{text!r}. Choose another folder (out), or delete it"
        )
    settings = {name: value for name, value in found.about.items() if name not in (encoders.HASH, encoders.CONFIG)}
    refuse_differences(out, "index", settings, about)
    return found


def open_index(folder: str | Path) -> Index:
    """Open the index in a folder.

    Raises:
        ValueError: there is none, it is damaged, it was written by another version, or its encoder is another now.
    """
    folder = expanded(folder)
    path = folder / "index.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no index: make one with `farspan index --text TEXT --out {folder}`")
    try:
        about = parse_json(path.read_bytes(), str(path))
    except ValueError as error:
        raise ValueError(f"{error}. Delete the folder and build the index again with `farspan index`.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT or not checksums.is_sealed(folder):
        raise ValueError(
            f"{folder} was written by another version of farspan, or has no checksums (checksums.json): delete it "
            "and build it again with `farspan index`"
        )
    index = Index(folder, about)
    index.check()
    try:
        check_index(about)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {index._again}") from error
    _refuse_other_encoder(index)
    return index


def _refuse_other_encoder(index: Index) -> None:
    """Raise ValueError if the encoder of an index is not the one that made its vectors, which indexes of older versions
    do not record."""
    if encoders.HASH not in index.about:
        return
    try:
        encoder = encoders.encoder_named(index.about["encoder"])
    except ValueError:
        return  # as `search` will report
    if different := encoders.difference(index.about, encoders.record_of(encoder)):
        raise ValueError(
            f"the encoder {index.about['encoder']!r} has changed since it made the vectors of {index.folder}, or an "
            f"older farspan made them without its prompts: {different}. Restore it, or delete {index.folder} and build "
            "the index again with `farspan index`"
        )


def _cut(text: str, words: int, tokens: int | None, tokenizer: Any) -> list[str]:
    """Return consecutive pieces of a text, of `tokens` tokens if given, else of `words` words, without blank ones. Each
    character of a script without spaces is a word."""
    if tokens is None:
        starts = [found.start() for found in re.finditer(rf"[{UNSPACED}][^\w\s]*|[^\s{UNSPACED}]+", text)][words::words]
    else:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"][tokens::tokens]]
    return [text[a:b] for a, b in pairwise([0, *starts, len(text)]) if text[a:b].strip()]


def _write_bm25(folder: Path, passages: list[str], text: str) -> None:
    bm25s = optional_import("bm25s", "retrieval")
    words = _words(passages, return_ids=True)
    if not words.vocab:
        raise ValueError(f"text {text!r} has no words for BM25: give another text, or --kind dense")
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    index.save(folder / "bm25", show_progress=False)


def _write_vectors(folder: Path, passages: list[str], encoder: str, kind: str) -> None:
    faiss: Any = optional_import("faiss", "faiss") if kind == "faiss" else None
    model, cut = encoders.encoder_named(encoder), 0
    graph: Any = None
    vectors: Any = None
    for first in range(0, len(passages), VECTORS_AT_ONCE):
        some = passages[first : first + VECTORS_AT_ONCE]
        cut += encoders.num_cut(model, some)
        block = encoders.vectors_of(model, some)
        if faiss is not None:
            graph = graph or faiss.IndexHNSWFlat(block.shape[1], NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
            graph.add(block)
            continue
        if vectors is None:
            shape = len(passages), block.shape[1]
            vectors = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, shape)
        vectors[first : first + len(block)] = block
    if graph is not None:
        faiss.write_index(graph, str(folder / "index.faiss"))
    if cut:
        many = f"{cut:,} of {len(passages):,} passages have more tokens than the {model.max_seq_length:,}"
        report(
            f"warning: {many} that the encoder {encoder!r} reads: their ends are not searched. Use shorter passages "
            "(--words, --passage-tokens)."
        )


def _words(texts: list[str], return_ids: bool = False) -> Any:
    """Return the terms of each text; with `return_ids` in the form that bm25s indexes."""
    bm25s = optional_import("bm25s", "retrieval")
    composed = [unicodedata.normalize("NFC", text) for text in texts]
    return bm25s.tokenize(composed, token_pattern=_pattern("+"), return_ids=return_ids, show_progress=False)


def _best(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the `count` largest scores, largest first, equal ones by index; and these scores."""
    least = np.partition(scores, -count)[-count]
    above = np.flatnonzero(scores > least)
    above = above[np.argsort(-scores[above], kind="stable")]
    numbers = np.r_[above, np.flatnonzero(scores == least)[: count - len(above)]]
    return numbers, scores[numbers]


def _text_hash(documents: list[str]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        encoded = document.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:16]
