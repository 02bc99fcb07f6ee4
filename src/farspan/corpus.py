"""Text to token ids: txt, jsonl, parquet, folders, hub datasets, and the text every Python brings along.

A text is named by one string, the same in every command and config:

    path/to/file.txt            one document (any suffix but the next two: UTF-8 text)
    path/to/file.jsonl#column   a document a line; the column is `text` unless named
    path/to/file.parquet#column a document a row
    path/to/folder              all .txt, .md, .jsonl and .parquet files below it, in order of their names
    org/name@config:split#column  a hub dataset (config optional, split `train`, column `text` unless named)
    builtin                     Python's own library: see `builtin_texts`; also builtin:train, builtin:held-out
    random                      uniformly drawn tokens of the model's vocabulary
    shuffled:TEXT               the real tokens of TEXT, each window in shuffled order

Texts are tokenised once, without special tokens, and kept as memory-mapped arrays under a hash of their
content and the tokenizer (in $FARSPAN_CACHE, else ~/.cache/farspan).
"""

import hashlib
import json
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

CACHE_FORMAT = 1  # a change of what is stored, or of how text is tokenised, bumps it
AT_ONCE = 256  # documents that are tokenised together
NUM_RANDOM_TOKENS = 1 << 22
MIN_BUILTIN_CHARACTERS = 200
FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[^#]+))?(#(?P<column>.+))?")


@dataclass(frozen=True)
class Corpus:
    """Documents as token ids, one behind the other."""

    name: str  # as the user wrote it
    hash: str  # of the texts and the tokenizer
    tokens: Int[np.ndarray, "total"]
    starts: Int[np.ndarray, "documents_plus_one"]  # document i is tokens[starts[i] : starts[i + 1]]
    characters: int | None = None  # of all documents; None where tokens were drawn, not read
    shuffled: bool = False  # windows come with their tokens in shuffled order

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

    Raises:
        ValueError: no such text, no documents in it, a column it does not have, or not UTF-8.
    """
    if name.startswith("shuffled:"):
        return replace(load(name.removeprefix("shuffled:"), tokenizer), name=name, shuffled=True)
    if name == "random":
        return _random(tokenizer)

    digest, characters = hashlib.sha256(f"{CACHE_FORMAT} {tokenizer_hash(tokenizer)}".encode()), 0
    for text in read_texts(name):  # and once more to be tokenised: it is never in memory as a whole
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        characters += len(text)
    key = digest.hexdigest()[:16]
    folder = _cache_folder() / "corpora" / key
    if not (folder / "starts.npy").exists():
        _write(folder, _tokenised(read_texts(name), tokenizer))
    tokens, starts = np.load(folder / "tokens.npy", mmap_mode="r"), np.load(folder / "starts.npy")
    return Corpus(name, key, tokens, starts, characters=characters)


def read_texts(name: str) -> Iterator[str]:
    """The documents of a text, in order, empty ones left out.

    Raises:
        ValueError: as `load`.
    """
    found = False
    for text in _documents(name):
        if text.strip():
            found = True
            yield text
    if not found:
        raise ValueError(f"text {name!r} holds no documents")


def builtin_texts(part: str = "") -> Iterator[str]:
    """The text every Python brings: its library's .py files outside its tests, and the pydoc topics.

    Part `train` leaves out, and part `held-out` is, the twentieth chosen by a hash of each file's path. Parts
    `train+tests` and `held-out+tests` have the library's own tests, .txt and .rst files as well, where the Python has
    them. Files of under 200 characters and exact duplicates are left out.
    """
    from pydoc_data.topics import topics

    name, _, tests = part.partition("+")
    if name not in ("", "train", "held-out") or tests not in ("", "tests") or part == "+tests":
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


def _documents(name: str) -> Iterator[str]:
    if name == "builtin" or name.startswith("builtin:"):
        yield from builtin_texts(name.removeprefix("builtin").removeprefix(":"))
        return
    place, _, column = name.partition("#")
    path = Path(place).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in FOLDER_SUFFIXES)
        for file in files:
            yield from _file_documents(file, column)
    elif path.is_file():
        yield from _file_documents(path, column)
    elif path.suffix not in FOLDER_SUFFIXES and (hub := HUB_ID.fullmatch(name)):
        yield from _hub_documents(**hub.groupdict())
    else:
        raise ValueError(
            f"text {name!r} is neither a file, a folder, a hub dataset (org/name) nor a built-in text "
            "(builtin, builtin:held-out, random, shuffled:TEXT)"
        )


def _file_documents(path: Path, column: str) -> Iterator[str]:
    column = column or "text"
    if path.suffix == ".parquet":
        parquet = optional_import("pyarrow.parquet", "data").ParquetFile(path)
        if column not in parquet.schema_arrow.names:
            raise ValueError(
                f"{path} has no column {column!r}; it has {parquet.schema_arrow.names}: write {path}#COLUMN"
            )
        for batch in parquet.iter_batches(columns=[column]):
            yield from (str(text) for text in batch.column(0).to_pylist() if text is not None)
        return
    try:
        if path.suffix != ".jsonl":
            yield path.read_text("utf-8")
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
                if not isinstance(record, dict) or column not in record:
                    keys = sorted(record) if isinstance(record, dict) else type(record).__name__
                    raise ValueError(f"{path}, line {number} has no key {column!r}; it has {keys}: write {path}#KEY")
                if record[column] is not None:
                    yield str(record[column])
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it first, for instance with iconv") from error


def _hub_documents(id: str, config: str | None, split: str | None, column: str | None) -> Iterator[str]:
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
    for row in rows:
        if row[column] is not None:
            yield str(row[column])


def _random(tokenizer: Any) -> Corpus:
    ordinary = np.setdiff1d(np.arange(len(tokenizer)), np.asarray(tokenizer.all_special_ids, dtype=np.int64))
    tokens = np.random.default_rng(0).choice(ordinary, NUM_RANDOM_TOKENS)
    return Corpus("random", f"random-{tokenizer_hash(tokenizer)}", tokens, np.array([0, len(tokens)]))


def _tokenised(texts: Iterable[str], tokenizer: Any) -> Iterator[list[np.ndarray]]:
    """Documents as token ids, some at a time."""
    texts = iter(texts)
    while batch := list(islice(texts, AT_ONCE)):
        # split_special_tokens: a document that spells "<s>" holds three characters, not a beginning of text
        encoded = tokenizer(batch, add_special_tokens=False, split_special_tokens=True, verbose=False)
        yield [np.asarray(row, dtype=np.int32) for row in encoded["input_ids"]]


def _write(folder: Path, documents: Iterable[list[np.ndarray]]) -> None:
    """Writes beside the place and renames, so that a killed or a second process leaves no half corpus."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    sizes = [0]
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        with (Path(beside) / "tokens.npy").open("wb") as file:
            _write_header(file, 0)
            for some in documents:
                file.write(np.concatenate(some).tobytes())
                sizes += map(len, some)
            file.seek(0)
            _write_header(file, sum(sizes))  # as long as the first: numpy leaves room for an array to grow
        np.save(Path(beside) / "starts.npy", np.cumsum(sizes))
        folder.mkdir(exist_ok=True)
        for name in ("tokens.npy", "starts.npy"):  # `starts` last: its presence means complete
            os.replace(Path(beside) / name, folder / name)


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
