"""Rows as a table: a column for each field, and for each value of its settings, scores and reading."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from farspan.extras import optional_import
from farspan.files import written
from farspan.report.export import CsvTable, write_csv
from farspan.report.runs import Source

NESTED = ("settings", "scores", "reading")  # fields of a row whose values have columns of their own: scores.copy
METADATA = b"farspan.run"  # key of run.json in a Parquet file


def rows_table(source: Source) -> CsvTable:
    """Return a line for each row, failed ones included. In a column of lists, objects, or values of several types, all
    values are JSON."""
    lines = [_flat(asdict(row)) for row in source.rows]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    kinds: dict[str, set[type]] = {name: set() for name in columns}
    for line in lines:
        for name, value in line.items():
            if value is not None:
                kinds[name].add(float if type(value) is int else type(value))
    as_json = [name for name, found in kinds.items() if found & {list, dict, tuple} or len(found) > 1]
    for line in lines:
        line |= {name: json.dumps(line[name]) for name in as_json if line.get(name) is not None}
    return CsvTable(columns, lines)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    nested = {f"{name}.{key}": value for name in NESTED for key, value in row[name].items()}
    return {name: value for name, value in row.items() if name not in NESTED} | nested


def write_rows_csv(source: Source, folder: Path) -> list[Path]:
    """Write rows.csv; see `rows_table` and `write_csv`."""
    return [write_csv(folder / "rows.csv", rows_table(source))]


def write_rows_parquet(source: Source, folder: Path) -> list[Path]:
    """Write rows.parquet, with run.json under the key `farspan.run` of its metadata. Half a surrogate pair, as names of
    files can have, is written as \\udXXX.

    Raises:
        ValueError: pyarrow is not installed.
    """
    arrow, parquet = (optional_import(name, "data") for name in ("pyarrow", "pyarrow.parquet"))
    found = rows_table(source)
    columns = {name: [_encodable(line.get(name)) for line in found.lines] for name in found.columns}
    table = arrow.table(columns).replace_schema_metadata({METADATA: json.dumps(source.header)})
    with written(folder / "rows.parquet") as beside:
        parquet.write_table(table, beside)
    return [folder / "rows.parquet"]


def _encodable(value: Any) -> Any:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
