"""The documents of a named text: a text file, a column of a table, a folder, a hub dataset, or Python's library.

A text is named by one string, the same in every command and config:

    path/to/file.txt            one document (any suffix but those of tables: UTF-8 text)
    path/to/file.jsonl#column   one document per row: .jsonl, .ndjson, .json, .csv, .tsv or .parquet; column `text`
                                unless named
    path/to/folder              all .txt, .md, .jsonl, .ndjson and .parquet files in it and its folders, in order
                                of their names; hidden files, files of hidden folders and links to folders are left
                                out
    org/name@config:split#column  a hub dataset (config optional, split `train`, column `text` unless named)
    builtin                     Python's library: see `farspan.text.library`; also builtin:train, builtin:held-out
    random                      uniformly sampled tokens of the model's vocabulary, without special ones
    shuffled:TEXT               the real tokens of TEXT, each window in shuffled order

A column holds strings. Rows without one (null) and blank documents are left out and counted; other values are refused.
A byte-order mark at the beginning of a file is not part of its text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from farspan.files import expanded, write
from farspan.specs import closest
from farspan.text import utf8
from farspan.text.formats import FORMATS, Rows, rows_of
from farspan.text.hub import HUB_ID, hub_rows
from farspan.text.library import builtin_texts
from farspan.text.names import described, path_of_list
from farspan.text.utf8 import TextFile, refuse_surrogates

FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")
Document = str | TextFile | None  # None: a row without a text
Text = str | Path | Sequence[str]  # a name, or documents
LONGEST_NAME = 4096  # characters; a longer string is a document
LONGEST_PART = 255  # bytes between two / that file systems allow


def named(text: Text) -> str:
    """Return the name of a text. Documents, given as a list of strings, are written to a file in the cache; its path,
    which is the same for the same documents, is their name.

    Raises:
        ValueError: a string with a line break or too long for a name, or a list that holds no text, something other
            than strings, or half of a surrogate pair.
    """
    if isinstance(text, Path):
        return str(text)
    if isinstance(text, str):
        longest = max(len(part.encode(errors="replace")) for part in text.partition("#")[0].split("/"))
        if "\n" in text or len(text) > LONGEST_NAME or longest > LONGEST_PART:
            raise ValueError(
                f"text: got a string of {len(text):,} characters, expected a name such as 'builtin' or that of a file. "
                "Give a document as a list: text=[document]"
            )
        return text
    if not isinstance(text, Iterable) or isinstance(text, Mapping | bytes):
        raise ValueError(
            f"text: got {type(text).__name__}, expected a name such as 'builtin', a path, or a list of documents"
        )
    text = list(text)
    for number, document in enumerate(text):
        if not isinstance(document, str):
            raise ValueError(f"text: got {type(document).__name__} as document {number}, expected a string")
        refuse_surrogates(document, f"text: document {number}")
    if not any(document.strip() for document in text):
        raise ValueError("text: got no document with text in it, expected at least one")
    lines = "".join(json.dumps({"text": document}) + "\n" for document in text)
    path = path_of_list(hashlib.sha256(lines.encode()).hexdigest()[:16])
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, lines)
    return str(path)


def read_texts(name: str) -> Iterator[str]:
    """Yield the documents of a text in order, without blank ones.

    Raises:
        ValueError: as `documents`, or no documents.
    """
    found = False
    for document in documents(name):
        text = "".join(blocks(document))
        if text.strip():
            found = True
            yield text
    if not found:
        raise no_documents(name)


def no_documents(name: str) -> ValueError:
    """Return the error for a text without documents."""
    return ValueError(f"{described(name)} holds no documents: it is empty or blank. Give another")


def documents(name: str) -> Iterator[Document]:
    """Yield the documents of a text in order, also blank ones. The texts `random` and `shuffled:TEXT` have none.

    Raises:
        ValueError: no such text, a folder without files that are read, a column that it does not have or that holds no
            text, or not UTF-8.
    """
    if name == "builtin" or name.startswith("builtin:"):
        yield from builtin_texts(name.removeprefix("builtin").removeprefix(":"))
        return
    if name == "random" or name.startswith("shuffled:"):
        raise ValueError(f"text {name!r} has tokens but no documents: use a file, a folder, a hub dataset or builtin")
    place, number_sign, column = name.partition("#")
    if number_sign and not column:
        raise ValueError(f"text {name!r} has no column after #: write {place}#COLUMN, or omit the #")
    if not place:
        raise ValueError(
            f"a text has no name: got {name!r}, expected a file, a folder, a hub dataset (org/name) or builtin. Is a "
            "variable of the shell not set?"
        )
    path = expanded(place)
    if path.is_dir():
        if not (files := sorted(file for file in _visible(path) if file.suffix.lower() in FOLDER_SUFFIXES)):
            raise _no_files(path)
        if column and not any(file.suffix.lower() in FORMATS for file in files):
            raise ValueError(f"{path} has no columns: got #{column}, but it holds no .jsonl or .parquet file. Omit it.")
        for file in files:
            yield from _of_file(file, column)
    elif path.is_file():
        if column and path.suffix.lower() not in FORMATS:
            raise ValueError(f"{path} has no columns: got #{column}, but only {', '.join(FORMATS)} have them. Omit it.")
        yield from _of_file(path, column)
    elif hub := _hub_id(name, path):
        yield from _of_hub(hub["id"], hub["config"], hub["split"] or "train", hub["column"])
    else:
        raise _unknown(name)


def _visible(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its folders, without hidden ones."""
    for file in folder.rglob("*"):
        if not any(part.startswith(".") for part in file.relative_to(folder).parts) and file.is_file():
            yield file


def _no_files(folder: Path) -> ValueError:
    found = list(_visible(folder))
    endings = ", ".join(sorted({file.suffix.lower() or "no ending" for file in found})) or "no files"
    tables = sorted(str(file) for file in found if file.suffix.lower() in FORMATS)
    fix = f"Name one file: {tables[0]}#COLUMN" if tables else "Give another folder, or name one file"
    return ValueError(
        f"text {str(folder)!r} holds no file that is read: got {endings}, expected files that end in "
        f"{', '.join(FOLDER_SUFFIXES)}. {fix}"
    )


def check_name(name: str) -> None:
    """Raise ValueError if no built-in text, file or folder has this name, and it cannot be a hub dataset. Reading it
    finds other errors."""
    name = name.removeprefix("shuffled:")
    place = name.partition("#")[0]
    is_made = name in ("random", "shuffled") or name.partition(":")[0] == "builtin"
    if place and not is_made and not (path := expanded(place)).exists() and not _hub_id(name, path):
        raise _unknown(name)


def _hub_id(name: str, path: Path) -> re.Match[str] | None:
    """Return the match of HUB_ID with the name of a hub dataset; None for other names and those of files."""
    is_file = path.suffix.lower() in (*FOLDER_SUFFIXES, *FORMATS) or name.startswith(".")
    return None if is_file else HUB_ID.fullmatch(name)


def _unknown(name: str) -> ValueError:
    near = closest(name, ("builtin", "builtin:held-out", "shuffled"))
    return ValueError(
        f"text {name!r} is neither a file, a folder, a hub dataset (org/name) nor a built-in text "
        f"(builtin, builtin:held-out, random, shuffled:TEXT){near}"
    )


def blocks(document: Document) -> Iterable[str]:
    """Return the text of a document in blocks of bounded size."""
    if document is None:
        return ()
    if isinstance(document, str) and len(document) > utf8.BLOCK:
        return (document[first : first + utf8.BLOCK] for first in range(0, len(document), utf8.BLOCK))
    return (document,) if isinstance(document, str) else document


def _of_file(path: Path, column: str) -> Iterator[Document]:
    if path.suffix.lower() in FORMATS:
        yield from _column(rows_of(path, column or "text"), column or "text", str(path))
    else:
        yield TextFile(path)


def _of_hub(id: str, config: str | None, split: str, column: str | None) -> Iterator[str | None]:
    try:
        name, rows = hub_rows(id, config, split)
    except ValueError as error:
        raise ValueError(f"text {id!r} is neither a file nor a folder, and {error}") from error
    each = ((f"{name}, row {number:,}", row) for number, row in enumerate(rows, 1))
    yield from _column(Rows(each, rows.column_names), column or "text", id)


def _column(rows: Rows, column: str, place: str) -> Iterator[str | None]:
    """Yield the values of a column of text."""
    if rows.columns is not None and column not in rows.columns:
        raise _no_column(place, column, rows.columns, place)
    for where, row in rows.each:
        if column not in row:
            raise _no_column(where, column, sorted(row), place)
        value = row[column]
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"{where}: column {column!r} does not hold text: got {type(value).__name__} {value!r:.60}, expected a "
                "string. Name a column of strings with #COLUMN, or make one."
            )
        if value is not None:
            refuse_surrogates(value, f"{where}: column {column!r}")
        yield value


def _no_column(where: str, column: str, columns: list[str], place: str) -> ValueError:
    return ValueError(f"{where} has no column {column!r}; it has {columns}: write {place}#COLUMN")
