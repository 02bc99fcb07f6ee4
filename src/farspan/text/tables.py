"""Whole tables with named columns, from files (see `farspan.text.formats`), folders and the hub."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farspan.files import expanded
from farspan.text.formats import FORMATS, rows_of
from farspan.text.hub import HUB_ID, UnknownSplitError, hub_rows, mirror


@dataclass(frozen=True)
class Table:
    """The rows of a data set, at least one."""

    name: str  # for errors
    rows: list[dict[str, Any]]
    names: dict[str, list[str]] = field(default_factory=dict)  # by column of class numbers: the name of each class

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"{self.name} holds no rows. Give a file with rows")

    @property
    def each(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the place of each row, for errors, and the row."""
        yield from ((f"{self.name}, row {number}", row) for number, row in enumerate(self.rows, 1))

    def column(self, *wanted: str) -> str:
        """Return the first of these columns that the table has.

        Raises:
            ValueError: it has none, or a row lacks it.
        """
        there = list(self.rows[0])
        name = next((name for name in wanted if name in there), None)
        if name is None:
            raise ValueError(f"{self.name} has no column {' or '.join(map(repr, wanted))}; it has {there}")
        for where, row in self.each:
            if name not in row:
                raise ValueError(f"{where} has no {name!r}; it has {list(row)}")
        return name


def read_table(place: str | Path, splits: Sequence[str] = ("validation", "test")) -> Table:
    """Read a data set: a file, a folder, of which the first split that exists is read, or org/name@config:split on the
    hub, with the first split unless one is named.

    Raises:
        ValueError: no such data set, a damaged file, or no rows.
    """
    path = expanded(place)
    if path.is_file():
        if path.suffix.lower() not in FORMATS:
            raise ValueError(f"{path} has an unknown suffix: expected one of {', '.join(FORMATS)}")
        rows = rows_of(path)
        return Table(str(path), [row for _, row in rows.each], rows.names)
    if path.is_dir():
        return find_table(path, splits)
    if path.suffix.lower() not in FORMATS and (hub := HUB_ID.fullmatch(str(place))):
        return _first_split(hub["id"], hub["config"], [hub["split"]] if hub["split"] else splits)
    raise ValueError(
        f"data {str(place)!r} is neither a file ({', '.join(FORMATS)}) nor a folder nor a hub data set (org/name)"
        + mirror(str(place))
    )


def find_table(folder: str | Path, stems: Sequence[str]) -> Table:
    """Read a split of a data set in a folder, of the first stem that has files: STEM.jsonl, STEM.csv, ..., or the
    parquet files that the hub names STEM-00000-of-00002.parquet or STEM/0000.parquet.

    Raises:
        ValueError: no stem has files.
    """
    folder = expanded(folder)
    for stem in stems:
        patterns = [stem + suffix for suffix in FORMATS] + [f"{stem}-*-of-*.parquet", f"{stem}/*.parquet"]
        for files in (sorted(folder.glob(pattern)) for pattern in patterns):
            if files:
                _refuse_missing(files)
                tables = [read_table(file) for file in files]
                return Table(tables[0].name, [row for table in tables for row in table.rows], tables[0].names)
    if not folder.is_dir():
        what = "a file, not" if folder.exists() else "not"
        raise ValueError(f"{folder} is {what} a folder with {' or '.join(stems)}: correct the path")
    there = sorted(path.name for path in folder.iterdir())
    raise ValueError(
        f"{folder} has no file {' or '.join(stems)} that ends in {', '.join(FORMATS)}; it holds {there}. Name the "
        "folder of that file"
    )


def _refuse_missing(files: Sequence[Path]) -> None:
    """Raise ValueError for parquet files named ...-of-N of which not all N are there."""
    if (found := re.search(r"-of-0*(\d+)$", files[0].stem)) and len(files) != int(found[1]):
        raise ValueError(f"{files[0]} is one of {found[1]} files, of which {len(files)} are there: add the others")


def _first_split(id: str, config: str | None, splits: Sequence[str]) -> Table:
    """Read the first of some splits that a data set on the hub has."""
    for split in splits[:-1]:
        with suppress(UnknownSplitError):
            return hub_table(id, config, split)
    return hub_table(id, config, splits[-1])


def hub_table(id: str, config: str | None, split: str, *, converted: bool = False) -> Table:
    """Read a data set on the hub.

    Raises:
        ValueError: as `hub_rows`, or no rows.
    """
    name, rows = hub_rows(id, config, split, converted=converted)
    names = {key: list(kind.names) for key, kind in rows.features.items() if hasattr(kind, "names")}
    return Table(name, rows.to_list(), names)
