"""The tables of the page as Markdown."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from farspan.report.export import capitalised, markdown_table, plain

DIFFERENCE = {
    "first": "first curve",
    "second": "second curve",
    "name": "length",
    "value": "difference",
    "interval": "interval",
    "p": "p",
    "pairs": "shared texts",
}  # keys of a line of the section and heads of the table
PAIRED = {
    "model": "model",
    "method": "method",
    "run": "run",
    "length": "length",
    "value": "difference",
    "interval": "interval",
    "p": "p",
    "pairs": "shared examples",
    "verdict": "verdict",
}  # keys of a line of the section and heads of the table
WHO = ("model", "method", "run", "trained")
FAILURE = ("model", "method", "run", "status", "reason", "rows", "first_length")


def markdown_page(context: Mapping[str, Any], files: list[str]) -> str:
    """Return the tables of the page.

    Args:
        context: the variables of its template.
        files: names of the CSV files beside it.
    """
    lines = [f"# {plain(context['title'])}", ""]
    for line in context["notes"]:
        lines += [f"**{plain(capitalised(line))}.**", ""]
    for section in context["groups"]:
        lines += [f"## {plain(section['title'])}", ""]
        lines += [plain(section["own"]["verdict"]), ""] if section["own"]["verdict"] else []
        if section["own"]["kind"] == "curve":
            lines += _curves(section)
        lines += _quality(section, context["about_paired"])
        for table in section["own"]["tables"]:
            lines += [f"{plain(table['title'])}:", "", *markdown_table(table["head"], table["lines"])]
    for test in context["text_tests"]:
        about = test["about"]
        lines += [f"## {plain(about.model)}, {plain(about.method)}: {about.which} (run {plain(about.run)})", ""]
        lines += [f"- {plain(line)}" for line in test["summary"]] + [""]
    if context["failures"]:
        head = [key.replace("_", " ") for key in FAILURE]
        lines += ["## What was not measured", ""]
        lines += markdown_table(head, ([one[key] for key in FAILURE] for one in context["failures"]))
    lines += ["## Runs", ""]
    for source in context["sources"]:
        commands = "; ".join(dict.fromkeys(session["command"] for session in source["sessions"]))
        lines.append(f"- {plain(source['name'])}: {source['rows']:,} rows; {plain(commands)}")
    return "\n".join([*lines, "", f"All numbers: {', '.join(files)}.", ""])


def _curves(section: Mapping[str, Any]) -> Iterator[str]:
    own = section["own"]
    if own["lines"]:
        yield from ("Tokens of text to be copied, 95 % intervals over texts.", "")
        lines = ([*_who(section["lines"][line["index"]]), *_curve(line, len(own["columns"]))] for line in own["lines"])
        yield from markdown_table([*WHO, *own["columns"], "repeats"], lines)
    if own["remarks"]:
        yield from (*(f"- {plain(remark)}" for remark in own["remarks"]), "")
    if own["differences"]:
        yield from (f"Differences in memory lengths. {own['about_differences']}", "")
        yield from _table(DIFFERENCE, own["differences"])


def _table(heads: Mapping[str, str], lines: Iterable[Mapping[str, Any]]) -> list[str]:
    return markdown_table([*heads.values()], ([one[key] for key in heads] for one in lines))


def _curve(line: Mapping[str, Any], count: int) -> list[object]:
    if line["cells"] is None:
        return [f"no row has a result: {line['failed']}", *[""] * count]
    return [*(f"{cell['value']} {cell['interval']}".strip() for cell in line["cells"]), line["repeats"]]


def _quality(section: Mapping[str, Any], about_paired: str) -> Iterator[str]:
    yield from (f"{capitalised(section['quality'])}, by {section['by']}, 95 % interval over examples.", "")
    lines = ([*_who(line), *map(_cell, line["cells"]), *line["more"]] for line in section["lines"])
    yield from markdown_table([*WHO, *section["lengths"], *section["more"]], lines)
    if section["compared"]:
        yield from (plain(capitalised(section["legend"])) + ".", "")
    for table in section["costs"]:
        yield from (f"{capitalised(table['title'])}:", "")
        yield from markdown_table(table["head"], table["lines"])
    if section["paired"]:
        yield from (f"Paired differences. {about_paired}", "")
        yield from _table(PAIRED, section["paired"])


def _cell(cell: Mapping[str, Any]) -> str:
    return "; ".join([f"{cell['value']} {cell['interval']}".strip(), *cell["more"]])


def _who(line: Mapping[str, Any]) -> list[str]:
    """Return the first columns of a line, WHO."""
    return [line["short"], line["method"], line["run"], f"{line['trained']:,}" if line["trained"] else "unknown"]
