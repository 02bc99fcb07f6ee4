"""Text to token ids: txt, jsonl, parquet, folders, hub datasets, and the text every Python brings along.

A text is named by one string, the same in every command and config:

    path/to/file.txt            one document (any suffix but the next two: UTF-8 text)
    path/to/file.jsonl#column   a document a line; the column is `text` unless named
    path/to/file.parquet#column a document a row
    path/to/folder              all .txt, .md, .jsonl and .parquet files below it, in order of their names; hidden files
                                and files of hidden folders are left out
    org/name@config:split#column  a hub dataset (config optional, split `train`, column `text` unless named)
    builtin                     Python's own library: see `builtin_texts`; also builtin:train, builtin:held-out
    random                      uniformly drawn tokens of the model's vocabulary
    shuffled:TEXT               the real tokens of TEXT, each window in shuffled order

A column holds strings. Rows without one (null) and blank documents are left out and counted; anything else is refused.
A byte-order mark at the beginning of a file is no part of its text.

Texts are tokenised once, without special tokens and in bounded memory (see `farspan.tokenising`), and kept as
memory-mapped arrays under a hash of their content and the tokenizer (in $FARSPAN_CACHE, else ~/.cache/farspan), with
checksums: a damaged copy is made again.
"""

import codecs
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from farspan import checksums
from farspan.files import built, parse_json, remove_leftovers
from farspan.terminal import shown
from farspan.tokenising import Piece, tokenised

CACHE_FORMAT = 1  # a change of what is stored, or of how text is tokenised, bumps it
BLOCK = 1 << 20  # characters, or bytes of a file, that are read at once
ROWS = 64  # of parquet that are read at once
NUM_RANDOM_TOKENS = 1 << 22
MIN_BUILTIN_CHARACTERS = 200
UNKNOWN_SHARE = 0.05  # of tokens; more of them unknown to the tokenizer are reported
LARGEST_SHARE = 0.9  # of tokens; one token that makes up more is reported
LINE_EVERY = 5.0, 15.0  # seconds between lines of progress, on a terminal and elsewhere
FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
COLUMN_SUFFIXES = (".jsonl", ".parquet")
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[^#]+))?(#(?P<column>.+))?")
_reported: set[str] = set()  # lines this process has printed


@dataclass(frozen=True)
class Corpus:
    """Documents as token ids, one behind the other."""

    name: str  # as the user wrote it
    hash: str  # of the texts and the tokenizer
    tokens: Int[np.ndarray, "total"]
    starts: Int[np.ndarray, "documents_plus_one"]  # document i is tokens[starts[i] : starts[i + 1]]
    characters: int | None = None  # of all documents; None where tokens were drawn, not read
    shuffled: bool = False  # windows come with their tokens in shuffled order
    ordered_hash: str | None = None  # of a shuffled text: the hash of the text itself
    unknown: float = 0.0  # share of tokens that are the tokenizer's unknown token

    @property
    def source(self) -> str:
        """The hash of the text in its own order: the same for a text and for it shuffled."""
        return self.ordered_hash or self.hash

    @property
    def characters_per_token(self) -> float | None:
        return self.characters / len(self.tokens) if self.characters and len(self.tokens) else None

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    def document(self, index: int) -> Int[np.ndarray, "time"]:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def num_windows(self, length: int, enough: int) -> int:
        """Windows of `length` tokens inside documents; where these are fewer than enough, in the documents as one."""
        inside = int((np.diff(self.starts) // length).sum())
        return inside if inside >= enough else len(self.tokens) // length

    def windows(self, length: int, count: int, seed: int) -> list[Int[np.ndarray, "length"]]:
        """`count` windows of `length` tokens that do not overlap, from as many different documents as possible.

        When the documents hold fewer than `count`, they are read as one. Short of that, window i is the same
        whatever `count` is.

        Raises:
            ValueError: the text holds fewer such windows.
        """
        rng = np.random.default_rng([seed, length])
        sizes = np.diff(self.starts)
        starts = self.starts[:-1]
        if (sizes // length).sum() < count:
            sizes, starts = sizes.sum(keepdims=True), starts[:1]
        per_document = sizes // length
        if per_document.sum() < count:
            raise ValueError(
                f"text {self.name!r} has {int(sizes.sum()):,} tokens, {int(per_document.sum())} windows of "
                f"{length:,}; {count} are needed: give a longer text, a smaller largest length (at most "
                f"{int(sizes.sum()) // count:,} here) or fewer repeats"
            )
        places: list[int] = []
        order = rng.permutation(np.flatnonzero(per_document))
        slots = {document: rng.permutation(per_document[document]) for document in order}
        offsets = {document: int(rng.integers(0, sizes[document] % length + 1)) for document in order}
        for cycle in range(int(per_document.max())):
            for document in order:
                if cycle < per_document[document]:
                    slot = int(slots[document][cycle])
                    places.append(int(starts[document]) + offsets[document] + slot * length)
            if len(places) >= count:
                break
        windows = [np.asarray(self.tokens[place : place + length], dtype=np.int64) for place in places[:count]]
        if self.shuffled:
            windows = [np.random.default_rng([seed, length, i]).permutation(window) for i, window in enumerate(windows)]
        return windows


def load(name: str, tokenizer: Any) -> Corpus:
    """The text `name` (see the top of this file) as token ids under `tokenizer`.

    Progress, and what a user should know of the text, is printed to stderr.

    Raises:
        ValueError: no such text, no documents in it, a column it does not have or that holds no text, not UTF-8, a text
            that changes while it is read, or a document too long for a tokenizer written in Python.
    """
    if name == "shuffled:":
        raise ValueError("text 'shuffled:' names no text: write shuffled:TEXT")
    if name.startswith("shuffled:"):
        text = load(name.removeprefix("shuffled:"), tokenizer)
        hashed = hashlib.sha256(f"shuffled {text.source}".encode()).hexdigest()[:16]
        return replace(text, name=name, hash=hashed, shuffled=True, ordered_hash=text.source)
    if name == "random":
        return _random(tokenizer)

    content = _Content(name, tokenizer)
    folder = _cache_folder() / "corpora" / content.key
    if content.num_left_out:
        report(f"text {name!r}: {content.num_left_out:,} blank documents or rows without text (null) are left out")
    remove_leftovers(folder.parent)  # of a command killed just after its last write here: nothing may be written again
    if not (cached := _cached(folder, name)):
        with built(folder, replace=folder.exists()) as beside:
            _write(beside, content, tokenizer)
        cached = _cached(folder, name)
        assert cached is not None
    tokens, starts, about = cached
    unknown = about["unknown"] / max(1, len(tokens))
    if unknown > UNKNOWN_SHARE:
        report(
            f"warning: {unknown:.1%} of the tokens of text {name!r} are unknown to the tokenizer "
            f"({tokenizer.unk_token}): numbers measured on it mean little. Use a text that this tokenizer can spell."
        )
    elif about["most"] > LARGEST_SHARE * len(tokens):
        report(
            f"warning: {about['most'] / len(tokens):.1%} of the tokens of text {name!r} are one token "
            f"({tokenizer.convert_ids_to_tokens(about['most_frequent'])!r:.40}): numbers measured on it mean little."
        )
    return Corpus(name, content.key, tokens, starts, characters=content.characters, unknown=unknown)


class _Content:
    """The documents of a text: their hash with the tokenizer's, which names the cache, and their sizes."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.characters = self.num_left_out = 0
        self._first = f"{CACHE_FORMAT} {tokenizer_hash(tokenizer)}".encode()
        self._sizes: list[int | None] = []  # bytes; None: blank
        digest = hashlib.sha256(self._first)
        for document in _documents(name):
            size = characters = 0
            blank = True
            for block in _blocks(document):
                size += len(block.encode())
                characters += len(block)
                blank = blank and not block.strip()
            self._sizes.append(None if blank else size)
            if blank:
                self.num_left_out += 1
                continue
            self.characters += characters
            digest.update(size.to_bytes(8, "little"))
            for block in _blocks(document):
                digest.update(block.encode())
        if not self.characters:
            raise ValueError(f"text {name!r} holds no documents: it is empty or blank. Give another")
        self.key = digest.hexdigest()[:16]

    def documents(self) -> Iterator[Iterable[str]]:
        """Yield the documents, each in blocks, reading them a second time.

        Raises:
            ValueError: they are not what they were at first.
        """
        digest = hashlib.sha256(self._first)

        def hashed(document: "str | _TextFile | None") -> Iterator[str]:
            for block in _blocks(document):
                digest.update(block.encode())
                yield block

        sizes = iter(self._sizes)
        same = True
        for document in _documents(self.name):
            size = next(sizes, -1)
            if size is None:
                same = not any(block.strip() for block in _blocks(document))
            elif size >= 0:
                digest.update(size.to_bytes(8, "little"))
                yield hashed(document)
            if not same or size == -1:
                break
        else:
            if next(sizes, -1) == -1 and digest.hexdigest()[:16] == self.key:
                return
        raise ValueError(
            f"text {self.name!r} changed while it was read. Repeat the command when nothing writes to it any more."
        )


def _cached(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, dict[str, int]] | None:
    """The tokens and starts of a text in the cache, and what is known of its tokens; None: not there, or damaged."""
    if not checksums.is_sealed(folder):  # nothing there, or from before there were checksums
        return None
    try:
        checksums.verify(folder, "tokens.npy", "starts.npy", "about.json")
        tokens, starts = np.load(folder / "tokens.npy", mmap_mode="r"), np.load(folder / "starts.npy")
        about = parse_json((folder / "about.json").read_bytes(), str(folder / "about.json"))
    except (ValueError, OSError) as error:
        report(f"the tokens of text {name!r} are made again, since their copy in the cache is damaged: {error}")
        return None
    return tokens, starts, about


def read_texts(name: str) -> Iterator[str]:
    """The documents of a text, in order, blank ones left out.

    Raises:
        ValueError: as `load`.
    """
    found = False
    for document in _documents(name):
        text = "".join(_blocks(document))
        if text.strip():
            found = True
            yield text
    if not found:
        raise ValueError(f"text {name!r} holds no documents: it is empty or blank. Give another")


def builtin_texts(part: str = "") -> Iterator[str]:
    """The text every Python brings: its library's .py files outside its tests, and the pydoc topics.

    Part `train` leaves out, and part `held-out` is, the twentieth chosen by a hash of each file's path. Parts
    `train+tests` and `held-out+tests` have the library's own tests, .txt and .rst files as well, where the Python has
    them. Files of under 200 characters and exact duplicates are left out.
    """
    from pydoc_data.topics import topics

    name, plus, tests = part.partition("+")
    if name not in ("", "train", "held-out") or tests != ("tests" if plus else "") or part == "+tests":
        raise ValueError(
            f"text 'builtin:{part}' is unknown: use builtin, builtin:train or builtin:held-out, the last two also "
            "with +tests"
        )
    library = Path(sysconfig.get_path("stdlib"))
    suffixes = (".py", ".txt", ".rst") if tests else (".py",)
    texts = {f"topics/{topic}": text for topic, text in topics.items()}
    for path in library.rglob("*"):
        place = path.relative_to(library)
        if path.suffix not in suffixes or "site-packages" in place.parts or place == Path("pydoc_data/topics.py"):
            continue
        if not tests and any(folder in ("test", "tests", "idle_test") for folder in place.parts):
            continue
        try:
            texts[place.as_posix()] = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a handful of the library's test files are in other encodings on purpose

    # what is held out stays so where another file is a copy of it
    seen = set(builtin_texts(part.replace("train", "held-out"))) if name == "train" else set()
    for place_name in sorted(texts):
        text = texts[place_name]
        held_out = int(hashlib.sha256(place_name.encode()).hexdigest(), 16) % 20 == 0
        if len(text) < MIN_BUILTIN_CHARACTERS or text in seen or (name and held_out != (name == "held-out")):
            continue
        seen.add(text)
        yield text


def tokenizer_hash(tokenizer: Any) -> str:
    """What decides how text becomes ids: the whole fast tokenizer, or class, vocabulary and added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        settled = json.loads(backend.to_str())
        # these two change with the last call
        content = json.dumps({key: value for key, value in settled.items() if key not in ("truncation", "padding")})
    else:
        content = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def offline() -> bool:
    """Whether the user keeps the hub's libraries off the network."""
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")


def cached_snapshot(id: str, branch: str = "main") -> Path | None:
    """The folder of a hub data set's files in the hub's cache, when offline: `datasets` finds only what it has prepared
    before. None: online, or not there."""
    if not offline():
        return None
    try:
        hub = optional_import("huggingface_hub", "data")
        return Path(hub.snapshot_download(id, repo_type="dataset", revision=branch, local_files_only=True))
    except OSError:
        return None


def expanded(place: str | Path) -> Path:
    """A path with its `~` replaced.

    Raises:
        ValueError: the home folder of a user that does not exist, or no name at all.
    """
    if not str(place):
        raise ValueError("a name is empty: got '', expected a file or folder. Is a variable of the shell not set?")
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(place)!r} is no path: {error} Correct the name after ~") from error


class _TextFile:
    """The text of a file, in blocks: UTF-8 without its byte-order mark, with `\\n` at the end of each line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
        read, first = 0, True
        with self.path.open("rb") as file:
            while True:
                data = file.read(BLOCK)
                read += len(data)
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    raise _not_utf8(self.path, read - len(error.object), error) from error
                if first and text:
                    text, first = text.removeprefix("\ufeff"), False
                if text:
                    yield text
                if not data:
                    return


def read_text(path: Path) -> str:
    """The text of a file: UTF-8 without its byte-order mark, with `\\n` at the end of each line.

    Raises:
        ValueError: not UTF-8.
    """
    return "".join(_TextFile(path))


def _not_utf8(path: Path, start: int, error: UnicodeDecodeError) -> ValueError:
    place, byte = start + error.start, error.object[error.start]
    return ValueError(
        f"{path} is not UTF-8 text: got the byte 0x{byte:02x} at place {place:,} ({error.reason}). Convert the file "
        "first, for instance with iconv."
    )


def _blocks(document: "str | _TextFile | None") -> Iterable[str]:
    if document is None:
        return ()
    if isinstance(document, str) and len(document) > BLOCK:
        return (document[first : first + BLOCK] for first in range(0, len(document), BLOCK))
    return (document,) if isinstance(document, str) else document


def _documents(name: str) -> "Iterator[str | _TextFile | None]":
    """The documents of a text; None for a row without one."""
    if name == "builtin" or name.startswith("builtin:"):
        yield from builtin_texts(name.removeprefix("builtin").removeprefix(":"))
        return
    place, number_sign, column = name.partition("#")
    if number_sign and not column:
        raise ValueError(f"text {name!r} names no column after #: write {place}#COLUMN, or omit the #")
    if not place:
        raise ValueError(
            f"a text has no name: got {name!r}, expected a file, a folder, a hub dataset (org/name) or builtin. Is a "
            "variable of the shell not set?"
        )
    path = expanded(place)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in FOLDER_SUFFIXES)
        files = [file for file in files if not _hidden(file.relative_to(path)) and file.is_file()]
        if column and not any(file.suffix.lower() in COLUMN_SUFFIXES for file in files):
            raise ValueError(f"{path} has no columns: got #{column}, but it holds no .jsonl or .parquet file. Omit it.")
        for file in files:
            yield from _file_documents(file, column)
    elif path.is_file():
        if column and path.suffix.lower() not in COLUMN_SUFFIXES:
            raise ValueError(f"{path} has no columns: got #{column}, but only .jsonl and .parquet have them. Omit it.")
        yield from _file_documents(path, column)
    elif path.suffix not in FOLDER_SUFFIXES and (hub := HUB_ID.fullmatch(name)):
        yield from _hub_documents(**hub.groupdict())
    else:
        raise ValueError(
            f"text {name!r} is neither a file, a folder, a hub dataset (org/name) nor a built-in text "
            "(builtin, builtin:held-out, random, shuffled:TEXT)"
        )


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_documents(path: Path, column: str) -> "Iterator[str | _TextFile | None]":
    column = column or "text"
    match path.suffix.lower():
        case ".parquet":
            yield from _parquet_documents(path, column)
        case ".jsonl":
            for number, line in read_lines(path):
                record = parse_json(line, f"{path}, line {number:,}")
                if not isinstance(record, dict) or column not in record:
                    keys = sorted(record) if isinstance(record, dict) else type(record).__name__
                    raise ValueError(f"{path}, line {number} has no key {column!r}; it has {keys}: write {path}#KEY")
                yield _text_of(record[column], f"{path}, line {number:,}", column)
        case _:
            yield _TextFile(path)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file that are not blank, with their numbers from 1.

    Raises:
        ValueError: not UTF-8.
    """
    number = start = 0
    with path.open("rb") as file:
        for data in file:
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, start, error) from error
            start += len(data)
            if not number:
                text = text.removeprefix("\ufeff")
            for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                number += 1
                if line.strip():
                    yield number, line


def _text_of(value: Any, where: str, column: str) -> str | None:
    """A value of a column of text.

    Raises:
        ValueError: neither a string nor null, or no Unicode text.
    """
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"{where}: column {column!r} holds no text: got {type(value).__name__} {value!r:.60}, expected a string. "
            "Name a column of strings with #COLUMN, or make one."
        )
    if value is not None:
        refuse_surrogates(value, f"{where}: column {column!r}")
    return value


def refuse_surrogates(text: str, where: str) -> None:
    """Raise ValueError if a text holds half of a surrogate pair, as JSON may spell it: no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds {text[error.start]!a} at character {error.start:,}: half of a surrogate pair, expected "
            "characters. Remove it, or write the pair"
        ) from error


def _parquet_documents(path: Path, column: str) -> Iterator[str | None]:
    parquet = optional_import("pyarrow.parquet", "data")
    number = 0
    with parquet_errors(path):
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{path} has no column {column!r}; it has {names}: write {path}#COLUMN")
    with parquet_errors(path):
        batches = file.iter_batches(batch_size=ROWS, columns=[column])
    while True:
        with parquet_errors(path):
            batch = next(batches, None)
            values = [] if batch is None or not batch.num_columns else batch.column(0).to_pylist()
        if batch is None:
            return
        for value in values:
            number += 1
            yield _text_of(value, f"{path}, row {number:,}", column)


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Errors of pyarrow name the file, in one line."""
    arrow = optional_import("pyarrow", "data")
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{path} is no parquet file, or a damaged one: {why.rstrip('.')}. Write it again") from error


def _hub_documents(id: str, config: str | None, split: str | None, column: str | None) -> Iterator[str | None]:
    datasets = optional_import("datasets", "data")
    try:
        rows = datasets.load_dataset(str(cached_snapshot(id) or id), config, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"hub dataset {id!r} (config {config}, split {split or 'train'}) cannot be read: {error}; "
            "a local file or folder of that name does not exist either"
            + ("; HF_HUB_OFFLINE is set: unset it to download" if offline() else "")
        ) from error
    column = column or "text"
    if column not in rows.column_names:
        raise ValueError(f"hub dataset {id!r} has no column {column!r}; it has {rows.column_names}: write {id}#COLUMN")
    for number, row in enumerate(rows, 1):
        yield _text_of(row[column], f"hub dataset {id!r}, row {number:,}", column)


def _random(tokenizer: Any) -> Corpus:
    ordinary = np.setdiff1d(np.arange(len(tokenizer)), np.asarray(tokenizer.all_special_ids, dtype=np.int64))
    tokens = np.random.default_rng(0).choice(ordinary, NUM_RANDOM_TOKENS)
    return Corpus("random", f"random-{tokenizer_hash(tokenizer)}", tokens, np.array([0, len(tokens)]))


def _write(folder: Path, content: _Content, tokenizer: Any) -> None:
    """Tokenises the documents into a new folder."""
    sizes, size = [0], 0
    counts = np.zeros(0, np.int64)
    pieces = tokenised(content.documents(), tokenizer, _Progress(content.name, content.characters))
    with (folder / "tokens.npy").open("wb") as file:
        _write_header(file, 0)
        for ids, last in _gathered(pieces):
            file.write(ids.tobytes())
            counts = _added(counts, np.bincount(ids))
            size += len(ids)
            sizes += [size - len(ids) + end for end in last]
        file.seek(0)
        _write_header(file, size)  # as long as the first: numpy leaves room for an array to grow
    np.save(folder / "starts.npy", np.array(sizes))
    unknown = getattr(tokenizer, "unk_token_id", None)
    about = {
        "unknown": 0 if unknown is None or unknown >= len(counts) else int(counts[unknown]),
        "most": int(counts.max(initial=0)),
        "most_frequent": int(counts.argmax()) if len(counts) else 0,
    }
    (folder / "about.json").write_text(json.dumps(about) + "\n")
    checksums.seal(folder)


def _gathered(pieces: Iterable[Piece]) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Pieces put together to larger ones, each with where in it documents end."""
    parts, ends, size = list[np.ndarray](), list[int](), 0
    for ids, last in pieces:
        parts.append(ids)
        size += len(ids)
        if last:
            ends.append(size)
        if size >= BLOCK:
            yield np.concatenate(parts), ends
            parts, ends, size = [], [], 0
    if parts:
        yield np.concatenate(parts), ends


def _added(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    total = np.zeros(max(len(one), len(other)), np.int64)
    total[: len(one)] += one
    total[: len(other)] += other
    return total


class _Progress:
    """Prints how much of a long text is tokenised, some seconds apart."""

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


def report(line: str) -> None:
    """Print a line that a user should read to stderr, once per process."""
    if line not in _reported:
        _reported.add(line)
        print(shown(line), file=sys.stderr, flush=True)


def _write_header(file: BinaryIO, size: int) -> None:
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int32)), "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(file, described)


def _cache_folder() -> Path:
    return Path(os.environ.get("FARSPAN_CACHE") or Path.home() / ".cache" / "farspan")


def optional_import(module: str, extra: str) -> Any:
    """A module that comes with one of farspan's extras.

    Raises:
        ValueError: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"this needs the package {error.name}: pip install 'farspan[{extra}]'") from error


def join(documents: Iterable[np.ndarray], separator: tuple[int, ...]) -> Int[np.ndarray, "total"]:
    """One stream of tokens with the separator before each document."""
    head = np.asarray(separator, dtype=np.int64)
    return np.concatenate([part for document in documents for part in (head, document)])
