"""Texts as token ids, cached. `farspan.text.documents` describes the names of texts.

Texts are tokenised once, without special tokens and in bounded memory (see `farspan.text.tokenising`). Their token ids
are stored in $FARSPAN_CACHE, else ~/.cache/farspan, under a hash of the content and the tokenizer, and memory-mapped.
Checksums are stored with them: a damaged copy is written again.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from farspan.files import built, cache_folder, parse_json, remove_leftovers
from farspan.terminal import report
from farspan.text import checksums, utf8
from farspan.text.documents import Document, blocks, documents, no_documents
from farspan.text.names import described
from farspan.text.tokenising import tokenised

CACHE_FORMAT = 1  # incremented when the stored content or the tokenisation changes
NUM_RANDOM_TOKENS = 1 << 22
UNKNOWN_SHARE = 0.05  # of tokens; a larger share of tokens unknown to the tokenizer is reported
ENDS = 64  # tokens of the beginning and of the end of a document by which a copy of it is known
LARGEST_SHARE = 0.9  # of tokens; a single token with a larger share is reported
LINE_EVERY = 5.0, 15.0  # seconds between lines of progress: on a terminal, otherwise


@dataclass(frozen=True)
class Corpus:
    """Documents as concatenated token ids."""

    name: str  # as the user gave it
    hash: str  # of the texts and the tokenizer
    tokens: Int[np.ndarray, "total"]
    starts: Int[np.ndarray, "documents_plus_one"]  # document i is tokens[starts[i] : starts[i + 1]]
    characters: int | None = None  # of all documents; None for random tokens
    shuffled: bool = False  # windows have their tokens in shuffled order
    ordered_hash: str | None = None  # of a shuffled text: the hash of the text itself
    unknown: float = 0.0  # share of tokens that are the tokenizer's unknown token
    content: str | None = None  # hash of the documents, the same for all tokenizers; None for random tokens
    _first: dict[tuple[int, int, int], list[int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def named(self) -> dict[str, str]:
        """The fields of a text in a task's settings; their order is part of the hashes of examples."""
        return {"text": self.name, "text_hash": self.hash}

    @property
    def source(self) -> str:
        """The hash of the text in its original order, the same for a text and its shuffled form."""
        return self.ordered_hash or self.hash

    @property
    def characters_per_token(self) -> float | None:
        return self.characters / len(self.tokens) if self.characters and len(self.tokens) else None

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    def document(self, index: int) -> Int[np.ndarray, "time"]:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def check_ordered(self) -> None:
        """Raise ValueError if the text is shuffled: a model cannot be trained on it."""
        if self.shuffled:
            raise ValueError(f"text {self.name!r} is shuffled: training needs its own order. Omit shuffled:")

    def share_in(self, other: "Corpus") -> float:
        """Return the share of this text's tokens that are in documents of another text, under the same tokenizer."""
        if self.source == other.source:
            return 1.0
        mine, theirs = np.diff(self.starts), np.diff(other.starts)
        keys = {other.key(index) for index in np.flatnonzero(np.isin(theirs, mine)).tolist()}
        alike = np.flatnonzero(np.isin(mine, theirs)).tolist()
        return float(sum(mine[index] for index in alike if self.key(index) in keys)) / len(self.tokens)

    def key(self, index: int) -> tuple[int, bytes, bytes]:
        """Return length, beginning and end of a document, which are equal only for copies of it."""
        document = self.document(index)
        return len(document), document[:ENDS].tobytes(), document[-ENDS:].tobytes()

    def num_windows(self, length: int, enough: int) -> int:
        """Return the number of windows of `length` tokens that `windows` can make: inside documents, or, if these are
        fewer than `enough`, in all documents read as one text."""
        inside = int((np.diff(self.starts) // length).sum())
        return inside if inside >= enough else len(self.tokens) // length

    def windows(self, length: int, count: int, seed: int) -> list[Int[np.ndarray, "length"]]:
        """Return the first `count` windows of `every_window`, which has at least as many."""
        first = self._first_places(length, count, seed)
        return [self._window(length, seed, number, place) for number, place in enumerate(first)]

    def every_window(self, length: int, least: int, seed: int, beside: int = 0) -> Iterator[Int[np.ndarray, "length"]]:
        """Yield windows of `length` tokens that do not overlap, from as many different documents as possible.

        If fewer than `least` windows fit inside documents, all documents are read as one text; otherwise window i does
        not depend on `least`. The windows of a shuffled text have their tokens in random order.

        Args:
            beside: tokens of each window that a task reads beside its length, for the length that an error suggests.

        Raises:
            ValueError: the text holds fewer than `least` windows.
        """
        for number, place in enumerate(self._places(length, least, seed, beside)):
            yield self._window(length, seed, number, place)

    def _window(self, length: int, seed: int, number: int, place: int) -> Int[np.ndarray, "length"]:
        window = np.asarray(self.tokens[place : place + length], dtype=np.int64)
        return np.random.default_rng([seed, length, number]).permutation(window) if self.shuffled else window

    def num_crossing_and_copied(self, length: int, count: int, seed: int) -> tuple[int, int]:
        """Return how many of the windows of `windows` hold the end of a document and the beginning of the next one, and
        how many are in a document that is a copy of an earlier window's.

        Raises:
            ValueError: as `windows`.
        """
        places = np.array(self._first_places(length, count, seed), dtype=np.int64)
        first, last = (np.searchsorted(self.starts, at, "right") - 1 for at in (places, places + length - 1))
        documents = first[first == last]
        return int((first != last).sum()), int((self.first_equal(documents) != documents).sum())

    def first_equal(self, documents: Int[np.ndarray, "documents"]) -> Int[np.ndarray, "documents"]:
        """Return for each of these documents the first of them that it is a copy of, itself without any."""
        found: dict[tuple[int, bytes, bytes], int] = {}
        return np.array([found.setdefault(self.key(one), one) for one in documents.tolist()], np.int64)

    def _first_places(self, length: int, count: int, seed: int) -> list[int]:
        """Return the first `count` places; kept, since a text of a million documents takes seconds."""
        if (key := (length, count, seed)) not in self._first:
            self._first[key] = list(islice(self._places(length, count, seed), count))
        return self._first[key]

    def _places(self, length: int, least: int, seed: int, beside: int = 0) -> Iterator[int]:
        """Yield where the windows of `every_window` begin."""
        rng = np.random.default_rng([seed, length])
        sizes = np.diff(self.starts)
        starts = self.starts[:-1]
        if (sizes // length).sum() < least:
            sizes, starts = sizes.sum(keepdims=True), starts[:1]
        per_document = sizes // length
        if (there := int(per_document.sum())) < least:
            most = int(sizes.sum()) // least - beside
            fixes = [f"give a text of at least {least * length:,} tokens"]
            fixes += [f"a smaller longest length (at most {most:,} here)"] * (most > 0)
            fixes += ["fewer repeats"] * (there > 0)
            windows = "1 window" if there == 1 else f"{there} windows"
            raise ValueError(
                f"{described(self.name)} has {int(sizes.sum()):,} tokens, {windows} of {length:,}; {least} are needed: "
                f"{', or '.join(fixes)}"
            )
        order = rng.permutation(np.flatnonzero(per_document))
        slots = {document: rng.permutation(per_document[document]) for document in order}
        offsets = {document: int(rng.integers(0, sizes[document] % length + 1)) for document in order}
        turns = ((cycle, one) for cycle in range(per_document.max()) for one in order if cycle < per_document[one])
        for cycle, document in turns:
            yield int(starts[document] + offsets[document] + slots[document][cycle] * length)


def load(name: str, tokenizer: Any) -> Corpus:
    """Return the text `name` (see `farspan.text.documents`) as token ids under `tokenizer`.

    Print progress and warnings about the text to stderr.

    Raises:
        ValueError: no such text, no documents in it, a column it does not have or that holds no text, not UTF-8, a text
            that changes while it is read, or a long document that this tokenizer cannot tokenise in pieces.
    """
    if name == "shuffled:":
        raise ValueError("text 'shuffled:' has no name of a text: write shuffled:TEXT")
    if name.startswith("shuffled:"):
        text = load(name.removeprefix("shuffled:"), tokenizer)
        hashed = hashlib.sha256(f"shuffled {text.source}".encode()).hexdigest()[:16]
        return replace(text, name=name, hash=hashed, shuffled=True, ordered_hash=text.source)
    if name == "random":
        # also tokens without a role that are special nevertheless, such as the reserved ones of Llama 3
        added = [number for number, one in tokenizer.added_tokens_decoder.items() if one.special]
        special = np.asarray([*tokenizer.all_special_ids, *added], dtype=np.int64)
        ordinary = np.setdiff1d(np.arange(len(tokenizer)), special)
        tokens = np.random.default_rng(0).choice(ordinary, NUM_RANDOM_TOKENS)
        hashed = f"random-{tokenizer_hash(tokenizer)}-{len(ordinary)}"
        return Corpus("random", hashed, tokens, np.array([0, len(tokens)]))

    content = _Content(name, tokenizer)
    folder = cache_folder() / "corpora" / content.key
    if content.num_left_out:
        report(f"{described(name)}: {content.num_left_out:,} blank documents or rows without text (null) are left out")
    remove_leftovers(folder.parent)  # of a command that was killed just after its last write here
    if not (cached := _cached(folder, name)):
        with built(folder, replace=folder.exists()) as beside:
            _write(beside, content, tokenizer)
        cached = _cached(folder, name)
        assert cached is not None
    tokens, starts, about = cached
    unknown = about["unknown"] / max(1, len(tokens))
    if unknown > UNKNOWN_SHARE:
        report(
            f"warning: {unknown:.1%} of the tokens of {described(name)} are unknown to the tokenizer "
            f"({tokenizer.unk_token}): results on it mean little. Use a text that this tokenizer can represent."
        )
    elif about["most"] > LARGEST_SHARE * len(tokens):
        report(
            f"warning: {about['most'] / len(tokens):.1%} of the tokens of {described(name)} are one token "
            f"({tokenizer.convert_ids_to_tokens(about['most_frequent'])!r:.40}): results on it mean little."
        )
    return Corpus(
        name, content.key, tokens, starts, characters=content.characters, unknown=unknown, content=content.hash
    )


def join(documents: Iterable[np.ndarray], separator: tuple[int, ...]) -> Int[np.ndarray, "total"]:
    """Return the concatenated tokens of all documents, with the separator before each document."""
    head = np.asarray(separator, dtype=np.int64)
    return np.concatenate([part for document in documents for part in (head, document)])


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a hash of the tokenizer's parts that determine the ids of a text: the whole fast tokenizer, or class,
    vocabulary with added tokens, and merges."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        settled = json.loads(backend.to_str())
        # truncation and padding depend on the last call
        content = json.dumps({key: value for key, value in settled.items() if key not in ("truncation", "padding")})
    else:
        parts = [type(tokenizer).__name__, tokenizer.get_vocab()]
        if ranks := getattr(tokenizer, "bpe_ranks", None):
            parts.append([list(pair) for pair in sorted(ranks, key=ranks.__getitem__)])
        content = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class _Content:
    """The documents of a text: their sizes, and their hash with the tokenizer's, which names the cache."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.characters = self.num_left_out = 0
        self._first = f"{CACHE_FORMAT} {tokenizer_hash(tokenizer)}".encode()
        self._sizes: list[int | None] = []  # bytes; None: blank
        digest, plain = hashlib.sha256(self._first), hashlib.sha256()
        for document in documents(name):
            size = characters = 0
            blank = True
            for block in blocks(document):
                size += len(block.encode())
                characters += len(block)
                blank = blank and not block.strip()
            self._sizes.append(None if blank else size)
            if blank:
                self.num_left_out += 1
                continue
            self.characters += characters
            pieces = (block.encode() for block in blocks(document))
            for piece in chain([size.to_bytes(8, "little")], pieces):
                digest.update(piece)
                plain.update(piece)
        if not self.characters:
            raise no_documents(name)
        self.key, self.hash = digest.hexdigest()[:16], plain.hexdigest()[:16]

    def documents(self) -> Iterator[Iterable[str]]:
        """Yield the documents that are not blank, each in blocks, from a second reading.

        Raises:
            ValueError: they have changed since the first reading.
        """
        digest = hashlib.sha256(self._first)

        def hashed(document: Document) -> Iterator[str]:
            for block in blocks(document):
                digest.update(block.encode())
                yield block

        sizes = iter(self._sizes)
        same = True
        for document in documents(self.name):
            size = next(sizes, -1)
            if size is None:
                same = not any(block.strip() for block in blocks(document))
            elif size >= 0:
                digest.update(size.to_bytes(8, "little"))
                yield hashed(document)
            if not same or size == -1:
                break
        else:
            if next(sizes, -1) == -1 and digest.hexdigest()[:16] == self.key:
                return
        raise ValueError(
            f"{described(self.name)} changed while it was read. Repeat the command when no program writes to it."
        )


def _cached(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, dict[str, int]] | None:
    """Return tokens, starts and statistics of a text in the cache; None if they are missing or damaged."""
    if not checksums.is_sealed(folder):  # the folder, or its checksums alone, are missing
        return None
    try:
        checksums.verify(folder, "tokens.npy", "starts.npy", "about.json")
        tokens, starts = np.load(folder / "tokens.npy", mmap_mode="r"), np.load(folder / "starts.npy")
        about = parse_json((folder / "about.json").read_bytes(), str(folder / "about.json"))
    except (ValueError, OSError) as error:
        report(f"the tokens of {described(name)} are computed again, since their copy in the cache is damaged: {error}")
        return None
    return tokens, starts, about


def _write(folder: Path, content: _Content, tokenizer: Any) -> None:
    """Tokenise the documents into a new folder."""
    starts, size = [0], 0
    with (folder / "tokens.npy").open("wb") as file:
        _write_header(file, 0)
        for ids, is_last in tokenised(content.documents(), tokenizer, _Progress(content.name, content.characters)):
            file.write(ids.tobytes())
            size += len(ids)
            if is_last:
                starts.append(size)
        file.seek(0)
        _write_header(file, size)  # of the same length: numpy pads the header so that an array can grow
    np.save(folder / "starts.npy", np.array(starts))
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    unknown = getattr(tokenizer, "unk_token_id", None)
    counts = np.zeros(1 + max(int(tokens.max(initial=0)), unknown or 0), np.int64)
    for first in range(0, size, utf8.BLOCK):
        counts += np.bincount(tokens[first : first + utf8.BLOCK], minlength=len(counts))
    about = {
        "unknown": 0 if unknown is None else int(counts[unknown]),
        "most": int(counts.max()),
        "most_frequent": int(counts.argmax()),
    }
    (folder / "about.json").write_text(json.dumps(about) + "\n")
    checksums.seal(folder)


class _Progress:
    """Print the progress of tokenising a long text every few seconds."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total = name, total  # characters
        self.started = self.printed = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.printed > LINE_EVERY[not sys.stderr.isatty()]:
            self.printed = now
            speed = done / (now - self.started)
            print(
                f"tokenising {self.name!r}: {done / self.total:.0%} of {self.total / 1e6:,.0f} million characters, "
                f"{speed / 1e6:.2f} million/s, about {(self.total - done) / speed:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def _write_header(file: BinaryIO, size: int) -> None:
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int32)), "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(file, described)
