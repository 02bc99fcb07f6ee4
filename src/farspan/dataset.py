"""Rows of a data set with named columns: from jsonl, json, csv, tsv and parquet files, and from the hub."""

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from farspan.corpus import HUB_ID, cached_snapshot, offline, optional_import

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
            raise ValueError(f"{self.name} holds no rows")

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
    path = Path(place).expanduser()
    if path.is_file():
        return _READERS.get(path.suffix, _unknown)(path)
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
    folder = Path(folder).expanduser()
    for stem in stems:
        patterns = [stem + suffix for suffix in SUFFIXES] + [f"{stem}-*-of-*.parquet", f"{stem}/*.parquet"]
        for files in (sorted(folder.glob(pattern)) for pattern in patterns):
            if files:
                tables = [read_table(file) for file in files]
                return Table(tables[0].name, [row for table in tables for row in table.rows], tables[0].names)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is {'a file, not' if folder.exists() else 'not'} a folder with {' or '.join(stems)}"
        )
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
    rows = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return _checked(path, rows)


def _json(path: Path) -> Table:
    try:
        return _checked(path, json.loads(_text(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _separated(delimiter: str) -> Callable[[Path], Table]:
    def read(path: Path) -> Table:
        text = _text(path)
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a cell may hold a whole document
        return Table(str(path), list(csv.DictReader(StringIO(text, newline=""), delimiter=delimiter)))

    return read


def _parquet(path: Path) -> Table:
    parquet = optional_import("pyarrow.parquet", "data")
    try:
        arrow = parquet.read_table(path)
    except ValueError as error:  # pyarrow's own are
        raise ValueError(f"{path} is no parquet file, or a damaged one: {error}") from error
    about = json.loads((arrow.schema.metadata or {}).get(b"huggingface", b"{}"))
    features = about.get("info", {}).get("features", {})
    names = {key: kind["names"] for key, kind in features.items() if isinstance(kind, dict) and kind.get("names")}
    return Table(str(path), arrow.to_pylist(), names)


def _unknown(path: Path) -> Table:
    raise ValueError(f"{path} ends in none of {', '.join(SUFFIXES)}")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it first, for instance with iconv") from error


def _checked(path: Path, rows: Iterable[Any]) -> Table:
    rows = rows if isinstance(rows, list) else [rows]
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{path} holds {type(row).__name__} {row!r:.60} where a row with named columns belongs")
    return Table(str(path), rows)


_READERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
}
