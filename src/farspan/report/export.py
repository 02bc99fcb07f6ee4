"""A report as Markdown and as two CSV files: every point of every curve, and the memory lengths."""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from farspan import stats
from farspan.files import written
from farspan.record import Row
from farspan.report import perplexity
from farspan.report.tables import Group, Member, Source, in_characters, spoken
from farspan.terminal import shown

MEASURES = ("fine", "coarse", "half_life", "reach", "span", "paper_fine", "paper_coarse")
WHOSE = ("run", "model", "method", "what", "version")
CURVE_COLUMNS = (
    *WHOSE, "length", "depth", "n", "scored", "context", "distance", "copy", "copy_low", "copy_high",
    "control", "control_low", "control_high", "memory_index", "status",
)  # fmt: skip
LENGTH_COLUMNS = (
    *WHOSE, "trained_length", "repeats", "measure", "tokens", "low", "high", "censored", "interval_censored",
    "reason", "characters",
)  # fmt: skip
NATS_COLUMNS = ("n", "nats", "nats_low", "nats_high")
ACCURACY_COLUMNS = ("accuracy", "accuracy_low", "accuracy_high")
PERPLEXITY_COLUMNS = (
    *WHOSE, "length", *NATS_COLUMNS, "perplexity", *ACCURACY_COLUMNS, "gain", "gain_low", "gain_high", "status",
)  # fmt: skip
POSITION_COLUMNS = (*WHOSE, "length", "begin", "end", *NATS_COLUMNS, *ACCURACY_COLUMNS)
MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_[]|#~!$"})
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute


def write_curves(groups: Sequence[Group], path: Path) -> Path:
    """A line per run, model, method, protocol and texts, length and depth. Empty cells are what is not known.

    Text from outside that a spreadsheet would take for a formula has an apostrophe in front.
    """
    return write_csv(path, CURVE_COLUMNS, (line for group in groups for one in group.members for line in _points(one)))


def write_memory_lengths(groups: Sequence[Group], path: Path) -> Path:
    """A line per curve and memory length, in tokens of context unless the column says characters."""
    return write_csv(
        path, LENGTH_COLUMNS, (line for group in groups for one in group.members for line in _lengths(one))
    )


def write_perplexity(groups: Sequence[perplexity.Group], path: Path) -> Path:
    """A line per run, model, method, targets and text, and length."""
    members = (one for group in groups for one in group.members)
    return write_csv(path, PERPLEXITY_COLUMNS, (line for one in members for line in _expectations(one)))


def write_positions(groups: Sequence[perplexity.Group], path: Path) -> Path:
    """A line per run, model, method and range of positions in the longest text, of those that scored every token."""
    members = (one for group in groups for one in group.members)
    return write_csv(path, POSITION_COLUMNS, (line for one in members for line in _positions(one)))


def markdown_page(context: Mapping[str, Any]) -> str:
    """The tables of the page; `context`: what its template is given."""
    lines = [f"# {plain(context['title'])}", ""]
    for section in context["groups"]:
        names = [spoken(name) for name in section["columns"]]
        lines += [f"## {plain(section['title'])}", "", "Tokens of text to be copied, 95 % interval over repeats.", ""]
        head = ["model", "method", "run", "claimed", *names, "repeats"]
        lines += _table(head, (_table_line(line, len(names)) for line in section["lines"]))
        lines += [f"- {plain(remark)}" for remark in section["remarks"]] + [""]
        if section["differences"]:
            lines += ["Differences from the first, in tokens unless said:", ""]
            keys = ("first", "second", "name", "value", "interval", "p", "pairs")
            lines += _table(keys, ([one[key] for key in keys] for one in section["differences"]))
    for section in context["perplexity"]:
        lines += [f"## {plain(section['title'])}", ""]
        lines += ["Nats per token, 95 % interval over windows; perplexity; accuracy.", ""]
        head = ["model", "method", "run", "claimed", *section["lengths"]]
        lines += _table(head, (_expected_line(line) for line in section["lines"]))
    for one in context["comparisons"]:
        lines += [
            f"## Comparison: {plain(one['title'])}",
            "",
            *_table(one["head"], one["lines"]),
            plain(one["legend"]),
            "",
        ]
    for test in context["text_tests"]:
        about = test["about"]
        lines += [f"## {plain(about.model)}, {plain(about.method)}: {about.which} (run {plain(about.run)})", ""]
        lines += [f"- {plain(line)}" for line in test["said"]] + [""]
    if context["failures"]:
        keys = ("model", "method", "run", "status", "reason", "rows", "first_length")
        lines += ["## What was not measured", ""]
        lines += _table(
            [key.replace("_", " ") for key in keys], ([one[key] for key in keys] for one in context["failures"])
        )
    lines += ["## Runs", ""]
    for source in context["sources"]:
        commands = "; ".join(session["command"] for session in source["sessions"])
        lines.append(f"- {plain(source['name'])}: {source['rows']:,} rows; {plain(commands)}")
    files = [*(["curves.csv"] if context["groups"] else []), *(["perplexity.csv"] if context["perplexity"] else [])]
    lengths = " Memory lengths: memory_lengths.csv." if context["groups"] else ""
    return "\n".join([*lines, "", f"Every point: {' and '.join(files)}.{lengths}" if files else "", ""])


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    rows = ["| " + " | ".join(plain(cell) for cell in line) + " |" for line in (head, *lines)]
    return [rows[0], "|" + "---|" * len(head), *rows[1:], ""]


def _line_head(line: Mapping[str, Any]) -> list[object]:
    return [line["name"], line["method"], line["run"], f"{line['trained']:,}" if line["trained"] else "unknown"]


def _expected_line(line: Mapping[str, Any]) -> list[object]:
    said = ((f"{c['value']} {c['interval']}".strip(), c["perplexity"], c["accuracy"]) for c in line["cells"])
    return [*_line_head(line), *("; ".join(part for part in parts if part) for parts in said)]


def _table_line(line: Mapping[str, Any], count: int) -> list[object]:
    whose = _line_head(line)
    if line["cells"] is None:
        return [*whose, f"every row failed: {line['failed']}", *[""] * count]
    return [*whose, *(f"{cell['value']} {cell['interval']}".strip() for cell in line["cells"]), line["repeats"]]


def plain(text: object) -> str:
    """Text from outside as Markdown that shows it and does nothing else, on a terminal too; fit for a cell."""
    return " ".join(escape(shown(str(text)), quote=False).translate(MARKDOWN).split())


def failures(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """What failed, by run, model, method, status and reason: how often, and first at which length."""
    found: dict[tuple[str, ...], list[int]] = {}
    for source in sources:
        for row in source.rows:
            if row.status != "ok":
                key = (source.name, row.model, row.method, row.status, row.reason)
                found.setdefault(key, []).append(row.length)
    names = ("run", "model", "method", "status", "reason")
    return [
        dict(zip(names, key, strict=True)) | {"rows": len(lengths), "first_length": min(lengths)}
        for key, lengths in found.items()
    ]


def write_csv(path: Path, columns: Sequence[str], lines: Iterable[Mapping[str, Any]], decimals: int | None = 6) -> Path:
    """Write a line of cells for each of the lines. `decimals`: of a number; None: all digits."""
    with written(path) as beside, beside.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for line in lines:
            writer.writerow({name: _cell(value, decimals) for name, value in line.items()})
    return path


def _cell(value: Any, decimals: int | None) -> Any:
    if isinstance(value, str):
        return f"'{shown(value)}" if value.startswith(FORMULA) else shown(value)
    if isinstance(value, float):
        if not np.isfinite(value):
            return None
        return value if decimals is None else round(value, decimals)
    return value


def _whose(one: Member | perplexity.Member) -> dict[str, Any]:
    series = one.series
    values = (one.source.name, series.model, series.method, series.what, one.rows[0].version)
    return dict(zip(WHOSE, values, strict=True))


def _points(one: Member) -> Iterable[dict[str, Any]]:
    where = stats.memory_map(one.rows)
    cells: dict[tuple[int, float], list[Row]] = {}
    for row in one.rows:
        cells.setdefault((row.length, row.depth), []).append(row)
    for column, depth in enumerate(where.depths.tolist()):
        curve = one.at_depth(depth)
        means = {
            name: stats.measured_mean(values) for name, values in (("copy", curve.copy), ("control", curve.control))
        }
        ends = {name: stats.bands(values) for name, values in (("copy", curve.copy), ("control", curve.control))}
        index = stats.memory_index(curve)
        for i, length in enumerate(curve.lengths.tolist()):
            line = _whose(one) | {"length": length, "depth": depth, "n": int(np.isfinite(curve.copy[:, i]).sum())}
            line["status"] = _status(cells.get((length, depth), []))
            if curve.measured[i]:
                line |= {"scored": int(curve.scored[i]), "context": int(curve.context[i])}
                line |= {
                    "distance": float(where.distance[where.lengths.tolist().index(length), column]),
                    "memory_index": float(index[i]),
                }
                for name, (low, high) in ends.items():
                    line |= {name: float(means[name][i]), f"{name}_low": float(low[i]), f"{name}_high": float(high[i])}
            yield line


def _status(rows: Iterable[Row]) -> str:
    failed = Counter(row.status for row in rows if row.status != "ok")
    return "; ".join(f"{count} {status}" for status, count in failed.items()) or "ok"


def _expectations(one: perplexity.Member) -> Iterable[dict[str, Any]]:
    (found,) = perplexity.as_data([one.series])
    measured = {at["length"]: at for at in found["lengths"]}
    rows: dict[int, list[Row]] = {}
    for row in one.rows:
        rows.setdefault(row.length, []).append(row)
    for length in one.series.lengths.tolist():
        numbers = dict(measured.get(length, {"length": length, "repeats": 0}))
        status = _status(rows.get(length, []))
        yield _whose(one) | {"n": numbers.pop("repeats"), "status": status} | numbers


def _positions(one: perplexity.Member) -> Iterable[dict[str, Any]]:
    (found,) = perplexity.as_data([one.series])
    whose = _whose(one) | {"length": max(one.series.ends, default=0), "n": len(one.series.position_nats)}
    return (whose | part for part in found["positions"])


def _lengths(one: Member) -> Iterable[dict[str, Any]]:
    if one.series.summary is None:
        return
    for measure in MEASURES:
        length: stats.MemoryLength = getattr(one.series.summary, measure)
        characters = in_characters(length, one.series)
        yield _whose(one) | {
            "trained_length": one.series.trained_length,
            "repeats": one.series.summary.repeats,
            "measure": measure,
            "tokens": float(length.value),
            "low": None if length.low is None else float(length.low),
            "high": None if length.high is None else float(length.high),
            "censored": length.censored,
            "interval_censored": length.interval_censored,
            "reason": length.reason,
            "characters": None if characters is None else float(characters.value),
        }
