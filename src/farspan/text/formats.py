"""The formats of files with named columns: jsonl (also named ndjson), json, csv, tsv and parquet, read row by row."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from farspan.extras import optional_import
from farspan.files import parse_json
from farspan.text.utf8 import lines_of, read_text, refuse_surrogates

ROWS = 64  # of parquet that are read at once


@dataclass(frozen=True)
class Rows:
    """Rows of a file or a data set, which can be read once, and their columns."""

    each: Iterator[tuple[str, dict[str, Any]]]  # the place of a row, for errors, and the row
    columns: list[str] | None = None  # None: each row has its own
    names: dict[str, list[str]] = field(default_factory=dict)  # by column of class numbers: the name of each class


def rows_of(path: Path, column: str | None = None) -> Rows:
    """Open a file whose suffix is in FORMATS.

    Args:
        column: the only one that is needed and that the caller checks; None: all columns are read and checked.

    Raises, now or when rows are read:
        ValueError: a damaged file, one that is not UTF-8, half of a surrogate pair, or two columns of one name.
    """
    return FORMATS[path.suffix.lower()](path, column)


def _jsonl(path: Path, column: str | None) -> Rows:
    numbered = enumerate((line.removesuffix("\n") for line in lines_of(path)), 1)
    lines = ((f"{path}, line {number:,}", line) for number, line in numbered if line.strip())
    return Rows((where, _checked(parse_json(line, where), line, where, column)) for where, line in lines)


def _json(path: Path, column: str | None) -> Rows:
    text = read_text(path)
    found = parse_json(text, str(path))
    numbered = enumerate(found if isinstance(found, list) else [found], 1)
    places = ((f"{path}, row {number:,}", row) for number, row in numbered)
    return Rows((where, _checked(row, text, where, column)) for where, row in places)


def _checked(row: Any, source: str, where: str, column: str | None) -> dict[str, Any]:
    """Return a row that was read from JSON."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} has no named columns: got {type(row).__name__} {row!r:.60}, expected an object")
    if column is None and "\\u" in source:
        refuse_surrogates(json.dumps(row, ensure_ascii=False), where)
    return row


def _separated(delimiter: str) -> Callable[[Path, str | None], Rows]:
    """Return the reader of a format whose cells are separated by `delimiter`."""

    def read(path: Path, column: str | None) -> Rows:
        csv.field_size_limit(max(csv.field_size_limit(), path.stat().st_size))  # a cell may hold a whole document
        lines = csv.reader(lines_of(path), delimiter=delimiter, strict=True)

        def read_cells() -> Iterator[list[str]]:
            first = 1  # line of the row
            try:
                for cells in lines:
                    first = lines.line_num + 1
                    yield cells
            except csv.Error as error:
                raise ValueError(
                    f"{path}: the row that begins in line {first:,} is damaged: {error}. A cell that begins with a "
                    "quote must end with one, and a quote within it is written twice"
                ) from error

        def each() -> Iterator[tuple[str, dict[str, Any]]]:
            number = 0
            for cells in cells_of_rows:
                if cells and len(cells) != len(header):
                    raise ValueError(
                        f"{path}, line {lines.line_num:,} has other columns than the header: got {len(cells)} cells, "
                        f"expected {len(header)}. Put cells that hold {delimiter!r} or a line end in quotes."
                    )
                if cells:
                    number += 1
                    yield f"{path}, row {number:,}", dict(zip(header, cells, strict=True))

        cells_of_rows = read_cells()
        header = next(cells_of_rows, [])
        if twice := [name for name, later in pairwise(sorted(header)) if name == later != ""]:
            raise ValueError(f"{path} has two columns {twice[0]!r}, expected different names. Rename one")
        return Rows(each(), header)

    return read


def _parquet(path: Path, column: str | None) -> Rows:
    parquet = optional_import("pyarrow.parquet", "data")
    with _parquet_errors(path):
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
        columns = [column] if column in schema.names else None
        batches = file.iter_batches(batch_size=ROWS, columns=columns)

    def each() -> Iterator[tuple[str, dict[str, Any]]]:
        with _parquet_errors(path):
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                yield f"{path}, row {number:,}", row

    return Rows(each(), schema.names, _class_names((schema.metadata or {}).get(b"huggingface", b"{}"), path))


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """Convert errors of pyarrow into errors of one line that name the file."""
    arrow = optional_import("pyarrow", "data")
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a parquet file, or is damaged: {why.rstrip('.')}. Write it again") from error


def _class_names(metadata: bytes, path: Path) -> dict[str, list[str]]:
    """Return, by column of class numbers, the name of each class, from the metadata that `datasets` writes."""
    where = f"the metadata 'huggingface' of {path}"
    found: Any = {"": parse_json(metadata, where)}
    for key in ("", "info", "features"):
        found = found.get(key, {})
        if not isinstance(found, dict):
            raise ValueError(f"{where} is damaged: got {type(found).__name__}, expected an object of info and features")
    names = {key: kind["names"] for key, kind in found.items() if isinstance(kind, dict) and kind.get("names")}
    for key, values in names.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{where} is damaged: got {values!r:.60}, expected the names of the classes of {key!r}")
    return names


FORMATS: dict[str, Callable[[Path, str | None], Rows]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
}
