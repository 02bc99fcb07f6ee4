"""Token ids of documents of any size, in bounded memory; they equal those of the whole document.

A tokenizer needs about two hundred bytes of memory per character of its input, so a long document is tokenised in
overlapping windows. The tokens of two neighbouring windows are joined where both have the same tokens at the same
places for AGREE tokens before and after:

- at the beginning of a word (a piece of the pre-tokenizer): the tokens before it are those of the first window, which
  has the text before them; the tokens after it are those of the second, since a word begins there in both;
- inside a word only for byte-pair encoding. There one token with the same two bounds in both windows is enough: no
  merge crosses its bounds in either window, so the merges to its left, inside and to its right do not affect each
  other, and none crosses them in the whole text.

Where the windows do not agree (a run of one character, merged in pairs from its beginning), the second window begins at
a token of the first instead. If they still do not agree, the first window is made longer. A text without any place to
join in MOST characters, such as a word of that length under a unigram model, is refused.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

WINDOW = 1 << 17  # characters of a long document that are tokenised at once
OVERLAP = 1 << 12  # characters that neighbouring windows share
MOST = 1 << 22  # characters: the longest window
AT_ONCE = 8  # windows that are tokenised together, by as many threads as the tokenizer has
DOCUMENTS_AT_ONCE = 256  # most short documents that are tokenised together
CHARACTERS_AT_ONCE = AT_ONCE * WINDOW  # of short documents: once they have as many, they are tokenised
AGREE = 16  # tokens before and after a join that must be equal in both windows
SHIFTS = 16  # characters by which a window may begin later, for tokenizers that add a space before their input
SLOW = 1 << 23  # characters of the longest document for a tokenizer written in Python

Piece = tuple[np.ndarray, bool]  # ids, and whether they are the last of their document


def tokenised(
    documents: Iterable[Iterable[str]], tokenizer: Any, progress: Callable[[int], None] = lambda characters: None
) -> Iterator[Piece]:
    """Yield the token ids of documents in order, a long document in several pieces.

    No special tokens are added; the text of a special token in a document is tokenised as characters.

    Args:
        documents: each as strings to be concatenated, none of which should be long.
        progress: called with the number of characters tokenised so far.

    Raises:
        ValueError: a document that cannot be tokenised in pieces, or that is too long for a tokenizer in Python.
    """
    done = 0
    short: list[str] = []
    cutter: _Cutter | None = None
    for document in documents:
        blocks = iter(document)
        head = _read(blocks, WINDOW + OVERLAP)
        is_long = len(head) > WINDOW + OVERLAP
        if not is_long:
            short.append(head)
        size = sum(map(len, short))
        if short and (is_long or len(short) == DOCUMENTS_AT_ONCE or size >= CHARACTERS_AT_ONCE):
            yield from _together(short, tokenizer)
            done += size
            progress(done)
            short = []
        if is_long:
            cutter = cutter or _Cutter(tokenizer)
            text = _Text(head, blocks)
            for ids, characters in cutter.tokens(text):
                yield ids, False
                progress(done + characters)
            yield np.empty(0, np.int32), True
            done += text.size
    yield from _together(short, tokenizer)
    progress(done + sum(map(len, short)))


def _together(texts: list[str], tokenizer: Any) -> Iterator[Piece]:
    if texts:
        # split_special_tokens: "<s>" in a document is three characters, not a beginning of text
        encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        yield from ((np.asarray(row, dtype=np.int32), True) for row in encoded["input_ids"])


def _read(blocks: Iterator[str], more_than: int) -> str:
    """Return the next blocks as one string, until it is longer than `more_than` or they end."""
    parts, size = [], 0
    while size <= more_than and (block := next(blocks, None)) is not None:
        parts.append(block)
        size += len(block)
    return "".join(parts)


class _Text:
    """The part of a document that is in memory: read, and not yet forgotten."""

    def __init__(self, head: str, blocks: Iterator[str]) -> None:
        self._held, self._start, self._blocks = head, 0, blocks
        self.size = len(head)  # characters read so far

    def __call__(self, start: int, end: int) -> str:
        """Return the characters from `start`, which is not forgotten, to `end` or the end of the document."""
        if end > self.size:
            more = _read(self._blocks, end - self.size - 1)
            self._held += more
            self.size += len(more)
        return self._held[start - self._start : end - self._start]

    def forget(self, before: int) -> None:
        self._held, self._start = self._held[before - self._start :], before

    def ends_at(self, place: int) -> bool:
        self(place, place + 1)
        return self.size <= place


@dataclass(frozen=True)
class _Window:
    """The tokens of a part of a document. Places are character offsets in the document."""

    start: int
    end: int
    ids: np.ndarray
    first: np.ndarray  # the place of each token's first character
    begins: np.ndarray  # indices of tokens before which the text can be cut: no other token crosses that place
    word: np.ndarray  # whether the token begins a word

    @classmethod
    def of(cls, encoding: Any, start: int, end: int) -> "_Window":
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2) + start
        first, last = places[:, 0], places[:, 1]
        words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
        before = np.maximum.accumulate(np.maximum(first, last))[:-1]
        after = np.minimum.accumulate(first[::-1])[::-1]
        apart = (first[1:] >= before) & (first[1:] > first[:-1]) & (after[1:] >= first[1:])
        word = np.r_[True, words[1:] != words[:-1]][: len(words)]
        return cls(start, end, np.array(encoding.ids, np.int32), first, np.flatnonzero(apart) + 1, word)

    def same(self, mine: int, other: "_Window", theirs: int) -> bool:
        """Return whether the tokens around token `mine` of this window equal those around token `theirs` of another, at
        the same places."""
        if min(mine, theirs) < AGREE or mine + AGREE > len(self.ids) or theirs + AGREE > len(other.ids):
            return False
        a, b = slice(mine - AGREE, mine + AGREE), slice(theirs - AGREE, theirs + AGREE)
        return (
            np.array_equal(self.ids[a], other.ids[b])
            and np.array_equal(self.first[a], other.first[b])
            and np.array_equal(self.word[a], other.word[b])
        )


class _Cutter:
    """Tokenise long documents with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.checked = tokenizer, False
        self.backend: Any = None
        if getattr(tokenizer, "is_fast", False):
            self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self.backend.no_truncation()
            self.backend.no_padding()
            self.backend.post_processor = None  # it would change the places of tokens
            self.backend.encode_special_tokens = True
            model = type(self.backend.model).__name__
            self.inside_words = model == "BPE" and not self.backend.model.dropout

    def tokens(self, text: _Text) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the ids of a document in pieces, each with the approximate character where it ends.

        Raises:
            ValueError: a tokenizer that needs whole documents, or a text that cannot be cut.
        """
        if self.backend is None or not self._as_given(text(0, OVERLAP)):
            yield self._whole(text)
            return
        left, kept, waiting = self._window(text, 0, WINDOW + OVERLAP), 0, list[_Window]()
        while not text.ends_at(left.end):
            waiting = [window for window in waiting if window.end > left.end]
            if not waiting:
                waiting = self._following(text, left)
            joined = self._join(left, waiting[0]) if waiting[0].start < left.end else None
            found = (waiting.pop(0), joined) if joined is not None else self._from_token(text, left, kept)
            if found is None:
                left, kept = self._longer(text, left, kept)
                continue
            right, (end, begin) = found
            yield left.ids[kept:end], right.start
            left, kept = right, begin
            text.forget(left.start)
        yield left.ids[kept:], left.end

    def _whole(self, text: _Text) -> tuple[np.ndarray, int]:
        """Return the ids of a document that cannot be tokenised in pieces, and its number of characters."""
        whole = text(0, SLOW + 1)
        if len(whole) > SLOW:
            raise ValueError(
                f"the tokenizer {type(self.tokenizer).__name__} is written in Python and takes a document as a whole: "
                f"got one of more than {SLOW:,} characters. Use the fast tokenizer of the model, or split the text "
                "into several documents (several files, or one line of jsonl each)."
            )
        return next(_together([whole], self.tokenizer))[0], len(whole)

    def _as_given(self, sample: str) -> bool:
        """Return whether the tokenizer gives the same ids as its backend alone."""
        if not self.checked:
            ids = self.tokenizer([sample], add_special_tokens=False, split_special_tokens=True, verbose=False)
            if self.backend.encode(sample, add_special_tokens=False).ids != list(ids["input_ids"][0]):
                self.backend = None
            self.checked = True
        return self.backend is not None

    def _window(self, text: _Text, start: int, size: int) -> _Window:
        given = text(start, start + size)
        return _Window.of(self.backend.encode(given, add_special_tokens=False), start, start + len(given))

    def _following(self, text: _Text, left: _Window) -> list[_Window]:
        """Return the next windows after `left`."""
        parts = list[tuple[str, int, int]]()
        for start in range(left.end - OVERLAP, left.end - OVERLAP + AT_ONCE * WINDOW, WINDOW):
            given = text(start, start + WINDOW + OVERLAP)
            if not parts or len(given) > OVERLAP:  # else the window before it contains all of this one
                parts.append((given, start, start + len(given)))
        encodings = self.backend.encode_batch([given for given, _, _ in parts], add_special_tokens=False)
        return [_Window.of(one, start, end) for one, (_, start, end) in zip(encodings, parts, strict=True)]

    def _join(self, left: _Window, right: _Window) -> tuple[int, int] | None:
        """Return where the windows can be joined, as the index in the left and in the right window of the first token
        that is taken from the right one; None if they do not agree anywhere."""
        mine = left.begins[left.first[left.begins] > right.start]
        theirs = right.begins[right.first[right.begins] < left.end]
        _, a, b = np.intersect1d(left.first[mine], right.first[theirs], assume_unique=True, return_indices=True)
        mine, theirs = mine[a], theirs[b]
        word = left.word[mine] & right.word[theirs]
        middle = np.abs(left.first[mine] - (right.start + left.end) // 2)
        for index in np.lexsort((middle, ~word)):
            if not word[index] and not self.inside_words:
                break
            if left.same(int(mine[index]), right, int(theirs[index])):
                return int(mine[index]), int(theirs[index])
        return None

    def _from_token(self, text: _Text, left: _Window, kept: int) -> tuple[_Window, tuple[int, int]] | None:
        """Return a window that begins at a token of the left one, and where they are joined; None if no such window
        agrees with the left one."""
        possible = left.begins[(left.begins > kept) & (left.begins < len(left.ids) - 4 * AGREE)]
        possible = possible[left.first[possible] <= left.end - OVERLAP]
        words = possible[left.word[possible]]
        if len(words) and (not self.inside_words or left.first[words[-1]] > left.end - 4 * OVERLAP):
            possible = words
        elif not self.inside_words:
            return None
        if not len(possible):
            return None
        start = int(left.first[possible[-1]])
        for shift in range(SHIFTS):
            if self._join(left, self._window(text, start + shift, left.end + OVERLAP - start)) is not None:
                right = self._window(text, start + shift, left.end - start + WINDOW)
                if (found := self._join(left, right)) is not None:
                    return right, found
        return None

    def _longer(self, text: _Text, left: _Window, kept: int) -> tuple[_Window, int]:
        """Return the left window, twice as long, and the index in it of the first token that is not yet yielded."""
        if left.end - left.start >= MOST:
            raise ValueError(
                f"a document cannot be tokenised in pieces: between its characters {left.start:,} and {left.end:,} "
                f"there is no place where this tokenizer ({type(self.backend.model).__name__}) gives the same tokens "
                "for the two parts. Break very long words or runs of one character with spaces or lines."
            )
        longer = self._window(text, left.start, min(MOST, 2 * (left.end - left.start)))
        if not kept:
            return longer, 0
        place = int(np.searchsorted(longer.first[longer.begins], left.first[kept]))
        number = int(longer.begins[place]) if place < len(longer.begins) else 0
        if not longer.same(number, left, kept):
            raise ValueError("a document cannot be tokenised in pieces: its tokens depend on later text. Split it.")
        return longer, number
