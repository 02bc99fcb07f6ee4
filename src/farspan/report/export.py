"""Text from outside as Markdown and CSV that show it and do nothing else."""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from farspan.files import written
from farspan.record import Row
from farspan.report.cells import Cell
from farspan.report.runs import Member
from farspan.terminal import shown

WHOSE = ("run", "model", "method", "what", "version")
MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_[]|#~!$"})
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute
DIGITS = 10


@dataclass(frozen=True)
class CsvTable:
    columns: Sequence[str]
    lines: Sequence[Mapping[str, Any]]  # by column; what is not known is None or missing


def plain(text: object) -> str:
    """Return text as Markdown that shows it and does nothing else, on a terminal too; fit for a cell."""
    return " ".join(escape(shown(str(text)), quote=False).translate(MARKDOWN).split())


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, and an empty line."""
    rows = ["| " + " | ".join(plain(cell) for cell in line) + " |" for line in (head, *lines)]
    return [rows[0], "|" + "---|" * len(head), *rows[1:], ""]


def write_csv(path: Path, table: CsvTable) -> Path:
    """Write a table; empty cells are unknown values.

    Text that a spreadsheet would take for a formula has an apostrophe in front, and control characters are visible
    signs.
    """
    with written(path) as beside, beside.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, table.columns)
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in line.items()} for line in table.lines)
    return path


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{shown(value)}" if value.startswith(FORMULA) else shown(value)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value


def quality_table(found: Sequence[Cell]) -> CsvTable:
    """Return a line for each cell with all its numbers."""
    details = list(dict.fromkeys(name for cell in found for name in cell.details))
    names = [one.name for one in fields(Cell) if one.name not in ("name", "details", "statuses")]
    lines = [
        {name: getattr(cell, name) for name in names}
        | {f"detail_{name}": cell.details.get(name) for name in details}
        | {"statuses": "; ".join(f"{count} {status}" for status, count in cell.statuses.items())}
        for cell in found
    ]
    return CsvTable([*names, *(f"detail_{name}" for name in details), "statuses"], lines)


def whose(member: Member, what: str) -> dict[str, Any]:
    """Return how a line of a CSV file begins."""
    values = (member.source.name, member.model, member.method, what, member.rows[0].version)
    return dict(zip(WHOSE, values, strict=True))


def statuses(rows: Iterable[Row]) -> str:
    """Return how many rows failed and how, or ok."""
    failed = Counter(row.status for row in rows if row.status != "ok")
    return "; ".join(f"{count} {status}" for status, count in failed.items()) or "ok"


def p_value(p: float | None) -> str:
    """Write a p as in a table."""
    return "unknown" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
