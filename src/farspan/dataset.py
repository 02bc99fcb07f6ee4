"""Rows of a data set with named columns: from jsonl, json, csv, tsv and parquet files, and from the hub."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from farspan.corpus import (
    HUB_ID,
    cached_snapshot,
    expanded,
    offline,
    optional_import,
    parquet_errors,
    read_lines,
    read_text,
    refuse_surrogates,
)
from farspan.files import parse_json

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
CONVERTED = "refs/convert/parquet"  # the branch where the hub keeps a data set that is a script as parquet
# by their old names, which are scripts or no longer found, the data sets that are files on the hub
MIRRORS = {
    "nq_open": "google-research-datasets/nq_open:validation",
    "trivia_qa": "mandarjoshi/trivia_qa@rc.nocontext:validation",
    "popqa": "akariasai/PopQA:test",
}


@dataclass(frozen=True)
class Table:
    """Rows, and what the numbers of a column stand for, where the data set says it."""

    name: str  # for errors
    rows: list[dict[str, Any]]
    names: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"{self.name} holds no rows. Give a file with some")

    def column(self, *wanted: str) -> str:
        """The first of these columns that is there.

        Raises:
            ValueError: none is, or a row lacks it.
        """
        there = list(self.rows[0])
        name = next((name for name in wanted if name in there), None)
        if name is None:
            raise ValueError(f"{self.name} has no column {' or '.join(map(repr, wanted))}; it has {there}")
        for number, row in enumerate(self.rows, 1):
            if name not in row:
                raise ValueError(f"{self.name}, row {number} has no {name!r}; it has {list(row)}")
        return name


def read_table(place: str | Path, splits: Sequence[str] = ("validation", "test")) -> Table:
    """The rows of a file, of the first of the splits that a folder has, or of org/name@config:split on the hub, of the
    first of the splits unless one is named.

    Raises:
        ValueError: nothing there, a damaged file, or no rows.
    """
    path = expanded(place)
    if path.is_file():
        return _READERS.get(path.suffix.lower(), _unknown)(path)
    if path.is_dir():
        return find_table(path, splits)
    if path.suffix not in SUFFIXES and (hub := HUB_ID.fullmatch(str(place))):
        return hub_table(hub["id"], hub["config"], hub["split"] or splits[0])
    raise ValueError(
        f"data {str(place)!r} is neither a file ({', '.join(SUFFIXES)}) nor a folder nor a hub data set (org/name)"
        + _mirror(str(place))
    )


def find_table(folder: str | Path, stems: Sequence[str]) -> Table:
    """The rows of a split of a data set in a folder: of STEM.jsonl, STEM.csv, ..., or of the parquet files that the hub
    calls STEM-00000-of-00002.parquet or STEM/0000.parquet, for the first of the stems that is there.

    Raises:
        ValueError: there is none.
    """
    folder = expanded(folder)
    for stem in stems:
        patterns = [stem + suffix for suffix in SUFFIXES] + [f"{stem}-*-of-*.parquet", f"{stem}/*.parquet"]
        for files in (sorted(folder.glob(pattern)) for pattern in patterns):
            if files:
                tables = [read_table(file) for file in files]
                return Table(tables[0].name, [row for table in tables for row in table.rows], tables[0].names)
    if not folder.is_dir():
        what = "a file, not" if folder.exists() else "not"
        raise ValueError(f"{folder} is {what} a folder with {' or '.join(stems)}: correct the path")
    there = sorted(path.name for path in folder.iterdir())
    raise ValueError(f"{folder} has no {' or '.join(stems)} with one of {', '.join(SUFFIXES)}; there: {there}")


def hub_table(id: str, config: str | None, split: str, *, converted: bool = False) -> Table:
    """The rows of a hub data set; `converted`: of the parquet that the hub makes of one that is a script.

    Offline it is looked for in the cache of the hub's files, then in that of `datasets`.

    Raises:
        ValueError: it cannot be read, or exists only as a script.
    """
    datasets = optional_import("datasets", "data")
    name = f"hub data set {id}@{config or 'default'}:{split}"
    files = f"{config or 'default'}/{split}/*.parquet"
    folder = cached_snapshot(id, CONVERTED if converted else "main")
    try:
        if converted:
            place = f"{folder or f'hf://datasets/{id}@{CONVERTED}'}/{files}"
            rows = datasets.load_dataset("parquet", data_files={split: place}, split=split)
        else:
            rows = datasets.load_dataset(str(folder or id), config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        why = f"{name} cannot be read: {error}"
        script = folder is not None and (folder / f"{id.rpartition('/')[2]}.py").is_file()
        if script or "scripts are no longer supported" in str(error):
            why = (
                f"{name} exists only as a script, which is not run; the hub keeps it as parquet in "
                f"hf://datasets/{id}@{CONVERTED}/{files}: download that and give the folder as data{_mirror(id)}"
            )
        raise ValueError(why + ("; HF_HUB_OFFLINE is set: unset it to download" if offline() else "")) from error
    names = {key: list(kind.names) for key, kind in rows.features.items() if hasattr(kind, "names")}
    return Table(name, rows.to_list(), names)


def _mirror(id: str) -> str:
    mirror = MIRRORS.get(id.rpartition("/")[2].lower())
    return f"; as files it is {mirror} on the hub" if mirror and mirror.partition(":")[0] != id else ""


def _jsonl(path: Path) -> Table:
    return Table(str(path), [_row(line, f"{path}, line {number:,}") for number, line in read_lines(path)])


def _json(path: Path) -> Table:
    text = read_text(path)
    rows = parse_json(text, str(path))
    rows = rows if isinstance(rows, list) else [rows]
    return Table(str(path), [_checked(row, text, f"{path}, row {number:,}") for number, row in enumerate(rows, 1)])


def _row(line: str, where: str) -> dict[str, Any]:
    return _checked(parse_json(line, where), line, where)


def _checked(row: Any, source: str, where: str) -> dict[str, Any]:
    """A row that was read from JSON.

    Raises:
        ValueError: no object, or half of a surrogate pair in it.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where} holds {type(row).__name__} {row!r:.60} where a row with named columns belongs")
    if "\\u" in source:
        refuse_surrogates(json.dumps(row, ensure_ascii=False), where)
    return row


def _separated(delimiter: str) -> Callable[[Path], Table]:
    def read(path: Path) -> Table:
        text = read_text(path)
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a cell may hold a whole document
        lines = csv.reader(StringIO(text, newline=""), delimiter=delimiter)
        try:
            header = next(lines, [])
            rows = []
            for cells in lines:
                if cells and len(cells) != len(header):
                    raise ValueError(
                        f"{path}, line {lines.line_num:,} has other columns than the header: got {len(cells)} cells, "
                        f"expected {len(header)}. Put cells that hold {delimiter!r} or a line end in quotes."
                    )
                rows += [dict(zip(header, cells, strict=True))] if cells else []
        except csv.Error as error:
            raise ValueError(f"{path}, line {lines.line_num:,} is damaged: {error}") from error
        return Table(str(path), rows)

    return read


def _parquet(path: Path) -> Table:
    parquet = optional_import("pyarrow.parquet", "data")
    with parquet_errors(path):
        arrow = parquet.read_table(path)
        rows = arrow.to_pylist()
    return Table(str(path), rows, _class_names((arrow.schema.metadata or {}).get(b"huggingface", b"{}"), path))


def _class_names(metadata: bytes, path: Path) -> dict[str, list[str]]:
    """What the numbers of columns stand for, by the metadata that `datasets` writes."""
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


def _unknown(path: Path) -> Table:
    raise ValueError(f"{path} ends in none of {', '.join(SUFFIXES)}")


_READERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
}
