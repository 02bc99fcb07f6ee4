"""The tables of the page as Markdown."""

from collections.abc import Iterator, Mapping
from typing import Any

from farspan.report.export import capitalised, markdown_table, plain

DIFFERENCE = ("first", "second", "name", "value", "interval", "p", "pairs")
PAIRED = ("name", "length", "value", "interval", "p", "pairs", "verdict")
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
            lines += _curves(section["own"])
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
        commands = "; ".join(session["command"] for session in source["sessions"])
        lines.append(f"- {plain(source['name'])}: {source['rows']:,} rows; {plain(commands)}")
    return "\n".join([*lines, "", f"All numbers: {', '.join(files)}.", ""])


def _curves(own: Mapping[str, Any]) -> Iterator[str]:
    if own["lines"]:
        yield from ("Tokens of text to be copied, 95 % intervals over texts.", "")
        yield from markdown_table(
            ["model", "method", "trained", *own["columns"], "repeats"],
            (_curve(line, len(own["columns"])) for line in own["lines"]),
        )
    yield from [f"- {plain(remark)}" for remark in own["remarks"]] + [""]
    if own["differences"]:
        yield from (f"Differences in memory lengths. {own['about_differences']}", "")
        yield from markdown_table(DIFFERENCE, ([one[key] for key in DIFFERENCE] for one in own["differences"]))


def _curve(line: Mapping[str, Any], count: int) -> list[object]:
    about = [line["name"], line["method"], _trained(line)]
    if line["cells"] is None:
        return [*about, f"no row has a result: {line['failed']}", *[""] * count]
    return [*about, *(f"{cell['value']} {cell['interval']}".strip() for cell in line["cells"]), line["repeats"]]


def _quality(section: Mapping[str, Any], about_paired: str) -> Iterator[str]:
    yield from (f"{capitalised(section['quality'])}, by length in {section['unit']}, 95 % interval over examples.", "")
    lines = (
        [line["name"], line["method"], line["run"], _trained(line), *map(_cell, line["cells"]), *line["more"]]
        for line in section["lines"]
    )
    yield from markdown_table(["model", "method", "run", "trained", *section["lengths"], *section["more"]], lines)
    for table in section["costs"]:
        yield from (f"{capitalised(table['title'])}:", "")
        yield from markdown_table(table["head"], table["lines"])
    if section["paired"]:
        yield from (f"Paired differences. {about_paired}", "")
        yield from markdown_table(PAIRED, ([one[key] for key in PAIRED] for one in section["paired"]))


def _cell(cell: Mapping[str, Any]) -> str:
    return "; ".join([f"{cell['value']} {cell['interval']}".strip(), *cell["more"]])


def _trained(line: Mapping[str, Any]) -> str:
    return f"{line['trained']:,}" if line["trained"] else "unknown"
