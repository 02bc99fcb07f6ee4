"""Numbers as text, and untrusted text as Markdown and CSV that only display it."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from farspan.files import written
from farspan.record import Row
from farspan.report.cells import Cell
from farspan.report.figure import Figure, Heat
from farspan.report.runs import Member
from farspan.stats import bands, measured_mean
from farspan.terminal import shown

WHOSE = ("run", "model", "method", "what", "version")
MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_[]|#~!$"})
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # starts of text that a spreadsheet takes for a formula
DIGITS = 10
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}  # bytes


@dataclass(frozen=True)
class CsvTable:
    columns: Sequence[str]
    lines: Sequence[Mapping[str, Any]]  # by column; unknown values are None or missing


def plain(text: object) -> str:
    """Return text as Markdown that only displays it, also on a terminal and in a table cell."""
    return " ".join(escape(shown(str(text)), quote=False).translate(MARKDOWN).split())


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, and an empty line."""
    rows = ["| " + " | ".join(plain(cell) for cell in line) + " |" for line in (head, *lines)]
    return [rows[0], "|" + "---|" * len(head), *rows[1:], ""]


def write_csv(path: Path, table: CsvTable) -> Path:
    """Write a table as CSV and return its path."""
    with written(path) as beside:
        beside.write_text(_csv(table), encoding="utf-8", errors="backslashreplace", newline="")
    return path


def csv_link(table: CsvTable) -> str:
    """Return a table as CSV in a `data:` address, which a page can link to."""
    return "data:text/csv;charset=utf-8," + quote(_csv(table), safe=",:'()", errors="backslashreplace")


def _csv(table: CsvTable) -> str:
    """Return a table as CSV; empty cells are unknown values.

    Text that a spreadsheet would take for a formula has an apostrophe in front, and control characters are visible
    signs.
    """
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, table.columns)
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in line.items()} for line in table.lines)
    return file.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{shown(value)}" if value.startswith(FORMULA) else shown(value)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value


def quality_table(found: Sequence[Cell]) -> CsvTable:
    """Return a line for each cell with all its numbers."""
    details = list(dict.fromkeys(name for cell in found for name in cell.details))
    others = ("name", "details", "statuses", "cost_failed", "cost_reason")
    names = [one.name for one in fields(Cell) if one.name not in others]
    lines = [
        {name: getattr(cell, name) for name in names}
        | {f"detail_{name}": cell.details.get(name) for name in details}
        | {"statuses": "; ".join(f"{count} {status}" for status, count in cell.statuses.items())}
        for cell in found
    ]
    return CsvTable([*names, *(f"detail_{name}" for name in details), "statuses"], lines)


def figure_table(one: Figure | Heat) -> CsvTable:
    """Return the numbers of a figure: a line for each point with its interval and for each length that failed, or for
    each cell of a map. Intervals of marks, such as half-lives, are in x."""
    if isinstance(one, Heat):
        cells = ((row, column.replace(",", "")) for row in one.rows for column in one.columns)
        values = zip(cells, one.values.ravel().tolist(), strict=True)
        return CsvTable((one.y, one.x, one.scale), [{one.y: y, one.x: x, one.scale: value} for (y, x), value in values])
    columns = ["line", one.x, one.y, "low", "high"]
    lines: list[dict[str, Any]] = []
    for line in one.lines:
        points = zip(line.x, line.y, *line.ends, strict=True)
        lines += [dict(zip(columns, (line.label, *point), strict=True)) for point in points]
    for failed in one.failed:
        lines += [{"line": failed.name, one.x: at, "failed": why} for at, why in sorted(failed.statuses.items())]
    return CsvTable([*columns, *(["failed"] if one.failed else [])], lines)


def whose(member: Member) -> dict[str, Any]:
    """Return the first columns of a line of a CSV file."""
    values = (member.source.name, member.model, member.method, member.what, member.rows[0].version)
    return dict(zip(WHOSE, values, strict=True))


def statuses(rows: Iterable[Row]) -> str:
    """Return the number of rows without a result by status, or "ok"."""
    missing = Counter(row.status for row in rows if row.status != "ok")
    return "; ".join(f"{count} {status}" for status, count in missing.items()) or "ok"


def number(value: float | None, sign: str = "") -> str:
    """Write a number with three digits after the point, two from 10 on; "" if it is unknown."""
    return "" if value is None else f"{value:{sign}.3f}" if abs(value) < 10 else f"{value:{sign},.2f}"


def three_digits(number: float) -> str:
    """Write a number with three significant digits, or all digits before the point."""
    return f"{number:,.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def written_as(cell: Cell) -> Callable[[float], str]:
    """Return how to write the quality of a cell: perplexities with three significant digits, else as `number`."""
    return three_digits if cell.exp else number


def bounds(
    low: float | None, high: float | None, write: Callable[[float], str] = number, *, high_is_beyond: bool = False
) -> str:
    """Write an interval, where there is one, with `>` before an upper end that is beyond the lengths measured."""
    if low is None or high is None or np.isnan(low):
        return ""
    return f"[{write(low)}, {'>' if high_is_beyond else ''}{write(high)}]"


def with_interval(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    """Write a number with its interval, where there is one."""
    return f"{number(value, sign)} {bounds(low, high, lambda end: number(end, sign))}".strip()


def ranged(point: Mapping[str, Any], name: str) -> str:
    """Write a number of a point with its interval, `name`_low to `name`_high."""
    return with_interval(point[name], point[f"{name}_low"], point[f"{name}_high"])


def quality_of(cell: Cell) -> str:
    """Write the quality of a cell with its interval, where there is one."""
    value = "" if cell.value is None else written_as(cell)(cell.value)
    return f"{value} {bounds(cell.low, cell.high, written_as(cell))}".strip()


def details_of(cell: Cell) -> list[str]:
    """Write the means of a cell's further scores, each with its name."""
    return [f"{name.replace('_', ' ')} {value:.3f}" for name, value in cell.details.items()]


def numbers(name: str, values: np.ndarray, *, least: float = -np.inf, most: float = np.inf) -> dict[str, float | None]:
    """Return mean and 95 % interval of some repeats as `name`, `name`_low and `name`_high, rounded to six digits after
    the point; None where there is none.

    Args:
        least, most: the values possible, to which the interval is cut.
    """
    ends = (measured_mean(values), *bands(values, least, most))
    found = zip((name, f"{name}_low", f"{name}_high"), ends, strict=True)
    return {key: round(float(value), 6) if np.isfinite(value) else None for key, value in found}


def capitalised(text: str) -> str:
    """Return a text with a capital first letter; the others keep their case, as in LongPPL."""
    return text[:1].upper() + text[1:]


def length_in(unit: str) -> str:
    """Return what the lengths of a task are, for titles and heads: length in tokens, or number of passages."""
    return "length in tokens" if unit == "tokens" else f"number of {unit}"


def counted(count: int, what: str) -> str:
    """Write a number of things: 1 repeat, 3 repeats."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def memory_size(size: float) -> str:
    """Write a number of bytes: 131 GiB, 8.25 MiB, 36.0 KiB, 512 bytes."""
    unit = next((name for name, least in UNITS.items() if size >= least), "")
    return f"{three_digits(size / UNITS[unit])} {unit}" if unit else counted(round(size), "byte")


def duration(seconds: float) -> str:
    """Write a time in seconds up to 2 minutes, in minutes up to 2 hours, else in hours."""
    size, unit = (3600, "hours") if seconds > 7200 else (60, "minutes") if seconds > 120 else (1, "seconds")
    return f"{seconds / size:,.{size > 1 or seconds < 9.5:d}f} {unit}"


def p_value(p: float | None) -> str:
    """Write a p value for a table."""
    return "unknown" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
