"""A section for a model card: tables of what was measured, the pictures, and how to repeat it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.files import write
from farspan.record import by_key
from farspan.report.curves import HEADLINE, spoken
from farspan.report.export import capitalised, counted, length_in, markdown_table, plain, with_interval
from farspan.report.exports.numbers import Number, numbers_of
from farspan.report.kinds import MEMBERS, reports
from farspan.report.notices import command_of
from farspan.report.runs import Source, grouped, short_names
from farspan.terminal import shown

CARD = "farspan.md"


def write_model_card(source: Source, folder: Path) -> list[Path]:
    """Write farspan.md, a section of Markdown, and the pictures that it shows."""
    groups = grouped([source], MEMBERS)
    parts = reports(groups, folder)
    headings = {group.spec: part.heading(group) for part in parts for group in part.groups}
    pictures = [path for part in parts for path in part.draw()]
    shown_pictures = [path for path in pictures if path.suffix == ".png"]
    write(folder / CARD, shown("\n".join(_section(source, numbers_of(source), headings, shown_pictures))))
    return [folder / CARD, *pictures]


def _section(
    source: Source, numbers: Sequence[Number], headings: Mapping[str, str], pictures: Sequence[Path]
) -> Iterator[str]:
    yield from ("## Long-context memory", "", "Measured with farspan: 95 % intervals in brackets.", "")
    short = short_names(one.member.model for one in numbers)
    for group, mine in by_key((one.group, one) for one in numbers).items():
        yield from (f"### {plain(headings[group.spec])}", "")
        for whole in (True, False):
            found = [one for one in mine if (one.length is None) == whole]
            if found:
                yield from _table(found, short)
    for path in pictures:
        yield from (f"![{path.stem.replace('_', ' ').replace('-', ' ')}]({path.name})", "")
    for line in dict.fromkeys(map(_command, source.header["sessions"])):  # later ones can add methods or models
        yield from (line, "")


def _command(session: Mapping[str, Any]) -> str:
    """Return the version of farspan and the command of a session."""
    command, version = command_of(session), session.get("packages", {}).get("farspan", "unknown")
    return f"farspan {plain(version)}{': ' if command else ''}{plain(command)}"


def _table(numbers: Sequence[Number], short: dict[str, str]) -> Iterator[str]:
    """Return a table of some numbers of a group, a line each for model and method, a column for each number."""
    head = list(dict.fromkeys(one.id for one in sorted(numbers, key=lambda one: one.length or 0)))
    first = numbers[0]
    what = {one.id: spoken(one.name) if one.length is None else f"{one.length:,}" for one in numbers}
    if first.length is None:
        meanings = "; ".join(f"{spoken(name)}: {HEADLINE[name]}" for name in head)
        yield from (
            f"Lengths in tokens from the forgetting curve (arXiv 2410.04727). {meanings}; `>`, `<`: more and less than "
            "was measured.",
            "",
        )
    else:
        better = "higher" if first.higher_is_better else "lower"
        unit = first.group.entry["unit"]
        yield from (f"{plain(capitalised(spoken(first.name)))} by {plain(length_in(unit))} ({better} is better).", "")
    lines = []
    for (model, method), mine in by_key(((one.member.model, one.member.method), one) for one in numbers).items():
        cells = {one.id: _cell(one) for one in mine}
        count = counted(max(one.n for one in mine), "repeat" if first.length is None else "example")
        lines.append([short[model], method, *(cells.get(name, "") for name in head), count])
    yield from markdown_table(["model", "method", *(what[name] for name in head), ""], lines)


def _cell(one: Number) -> str:
    return str(one.memory) if one.memory else with_interval(one.value, one.low, one.high)
