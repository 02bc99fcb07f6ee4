"""The content of a report, section by section, as plain texts: the input of the page's template and of its Markdown."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from farspan.record import CONTENTS, TEXTS, by_key, flat
from farspan.report.cells import UNCORRECTED, Cell, by_member, cells_of
from farspan.report.example import examples
from farspan.report.export import bounds, capitalised, counted, details_of, length_in, p_value, written_as
from farspan.report.figure import shape
from farspan.report.figures import PRICES, cost_figure, quality_figure, trained_places
from farspan.report.interactive import colour, on_page
from farspan.report.notices import command_of, notices
from farspan.report.runs import Group, Source, short_names
from farspan.report.tables import WINS, cost_tables, legend, marked, unpaired, wins, with_direction
from farspan.report.task_report import TaskReport
from farspan.stats import LEVEL
from farspan.text.names import title_of

FOLD = 600  # tokens, at most, of an example shown open
ABOUT_PAIRED = (
    "From the baseline, the first line, over the same examples, in the unit of the score (nats for perplexity), with "
    f"95 % intervals; p after Holm. The {UNCORRECTED}."
)
FEW_LENGTHS = 10  # at most, of a table shown open
EXAMPLES = 1_000_000  # characters of all examples together, to keep the page small
FRONT = "Dashed: the Pareto front of the means: no point is better in both quality and cost."
MANY = 6  # members; the intervals of more would hide each other


def contents(sources: Sequence[Source], groups: Sequence[Group], parts: Sequence[TaskReport]) -> dict[str, Any]:
    """Return everything that is shown, under the names that the template uses.

    Args:
        parts: the results of all groups.
    """
    shown = {one.source.name for group in groups for one in group.members}
    page: dict[str, Any] = {"meanings": {}, "text_tests": [], "about_paired": ABOUT_PAIRED}
    for part in parts:
        page |= part.summary()
    part_of = {group: part for part in parts for group in part.groups}
    sections = [section(group, part_of[group], number) for number, group in enumerate(groups, 1)]
    known: list[Any] = []  # tasks of one run share their costs: each table is shown once
    for one in sections:
        one["costs"] = [table for table in one["costs"] if table not in known]
        known += one["costs"]
    return page | {
        "title": _title([_name(group, part_of[group]) for group in groups], sources),
        "notes": notices(sources),
        "groups": sections,
        "examples": _examples(sources),
        "failures": failures(sources),
        "sources": [_provenance(source) for source in sources],
        "empty": [source.name for source in sources if source.name not in shown],
    }


def _title(tasks: Sequence[str], sources: Sequence[Source]) -> str:
    names = sorted(short_names(row.model for source in sources for row in source.rows).values())
    whose = f"{len(names)} models"
    if len(names) <= 3:
        whose = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    tasks = list(dict.fromkeys(tasks))
    what = f"{len(tasks)} tasks" if len(tasks) > 3 or not tasks else ", ".join(tasks)
    return f"{capitalised(what)} of {whose}"


def _name(group: Group, part: TaskReport) -> str:
    """Return the name of a task without its settings."""
    return part.name_of(group) or f"{group.entry['quality']['name']} ({group.spec.partition(':')[0]})"


def section(group: Group, part: TaskReport, number: int) -> dict[str, Any]:
    """Return the section of one group: its quality by length, and the further parts of its task."""
    cells = cells_of(group)
    members = by_member(cells)
    lengths = sorted({cell.length for cell in cells})
    quality = group.entry["quality"]
    own: dict[str, Any] = {"kind": "", "about": "", "verdict": "", "figures": [], "tables": [], "draws_quality": False}
    own |= part.section(group, number)
    trained = {one.name: one.trained_length for one in group.members}
    short = short_names(cell.model for cell in cells)
    compared = any(cell.verdict for cell in cells)
    figures = [*([] if own["draws_quality"] else _quality(group, cells, number)), *own["figures"]]
    figures += _costs(group, cells, number)
    return {
        "id": f"group-{number}",
        "title": part.heading(group),
        "about": own["about"],
        "quality": with_direction(quality),
        "unit": group.entry["unit"],
        "by": length_in(group.entry["unit"]),
        "methods": sorted({cell.method for cell in cells}),
        "lengths": [f"{length:,}" for length in lengths],
        "compared": compared,
        "costs": [{"title": title, "head": head, "lines": lines} for title, head, lines in cost_tables(cells)],
        "level": LEVEL,
        "more": [WINS] if compared else [],
        "unpaired": unpaired(cells),
        "legend": legend(cells),
        "lines": [
            _line(mine, index, trained, [wins(mine, cells)] if compared else []) | {"short": short[mine[0].model]}
            for index, mine in enumerate(members)
        ],
        "folded": len(lengths) > FEW_LENGTHS or own["draws_quality"],
        "paired": [_paired(cell) | {"model": short[cell.model]} for cell in cells if cell.difference is not None],
        "own": own,
        "figures": figures,
        "controls": any(
            "control" in str(trace.get("meta", {}).get("kind")) for one in figures for trace in one["data"]
        ),
        "many": len(members) > MANY,
        "log": group.entry["unit"] == "tokens" and not own["draws_quality"],
    }


def _quality(group: Group, cells: Sequence[Cell], number: int) -> list[dict[str, Any]]:
    """Return the figure of quality by length, where anything was measured."""
    quality = group.entry["quality"]
    if not any(cell.value is not None for cell in cells):
        return []
    trained = trained_places(group)
    key = "Cross: failed."
    key += " Dotted: the context the model was trained on." if trained else ""
    name = "Nats per token" if quality["exp"] else capitalised(quality["name"])
    heading = f"{name} by {length_in(group.entry['unit'])}"
    key = f"{capitalised(quality['name'])} is exp(nats). {key}" if quality["exp"] else key
    return [on_page(f"quality-{number}", heading, key, quality_figure(cells, "", trained))]


def _costs(group: Group, cells: Sequence[Cell], number: int) -> list[dict[str, Any]]:
    """Return the figures of quality against each cost that was measured."""
    quality = group.entry["quality"]
    found = []
    for price, words in PRICES.items():
        if (figure := cost_figure(cells, price, quality["higher_is_better"])) is not None:
            at = figure.title.rpartition(" at ")[2]
            heading = f"{capitalised(quality['name'])} against {words}"
            key = f"At {at}." if figure.front is None else f"At {at}. {FRONT}"
            found.append(on_page(f"{price}-{number}", heading, key, figure, "cost"))
    return found


def _line(mine: Sequence[Cell], index: int, trained: Mapping[str, int | None], more: list[str]) -> dict[str, Any]:
    """Return a line of the table of quality, with the marker of its lines in figures."""
    first = mine[0]
    line: dict[str, Any] = {"name": first.name, "model": first.model, "method": first.method, "run": first.run}
    line |= {"colour": colour(index), "glyph": shape(index)[0], "trained": trained[first.name]}
    return line | {"cells": [_cell(cell) for cell in mine], "more": more}


def _cell(cell: Cell) -> dict[str, Any]:
    """Return the quality at a length with its interval and details; the status and reason where rows failed."""
    if cell.value is None:
        return {"value": cell.failed or "–", "interval": "", "why": cell.reason, "more": []}
    more = [f"{np.log(cell.value):.3f} nats"] if cell.exp else []
    more += [*details_of(cell), *(f"{count} {status}" for status, count in cell.statuses.items())]
    interval = bounds(cell.low, cell.high, written_as(cell))
    return {"value": marked(cell), "interval": interval, "why": counted(cell.n, "example"), "more": more}


def _paired(cell: Cell) -> dict[str, str]:
    """Return a line of the table of differences from the baseline."""
    return {
        "name": cell.name,
        "method": cell.method,
        "run": cell.run,
        "length": f"{cell.length:,}",
        "value": f"{cell.difference:+.3f}",
        "interval": bounds(cell.difference_low, cell.difference_high, "{:+.3f}".format),
        "p": p_value(cell.p_holm),
        "pairs": f"{cell.pairs:,}",
        "verdict": cell.verdict,
    }


def _examples(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the first example of each model and task of each run; those past a size are only named."""
    shown: list[dict[str, Any]] = []
    used = 0
    for example in (example for source in sources for example in examples(source)):
        used += sum(len(piece.text) for piece in example.pieces)
        shown.append({"about": example, "run": example.source.name, "open": example.num_tokens <= FOLD})
        share = "" if example.num_hits is None else f"{example.num_hits / example.num_scored:.0%}"
        shown[-1] |= {"pieces": example.pieces if used <= EXAMPLES else [], "share": share}
    return shown


def failures(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """Return the failures by run, model, method, status and reason: their number and the first length."""
    failed = ((source.name, row) for source in sources for row in source.rows if row.status != "ok")
    found = by_key(((run, row.model, row.method, row.status, row.reason), row.length) for run, row in failed)
    names = ("run", "model", "method", "status", "reason")
    return [
        dict(zip(names, key, strict=True)) | {"rows": len(lengths), "first_length": min(lengths)}
        for key, lengths in found.items()
    ]


def _provenance(source: Source) -> dict[str, Any]:
    """Return settings, models and sessions of a run as names and texts."""
    header = source.header
    texts: dict[str, dict[str, None]] = {}  # by name and kind, the hashes: one for each tokenizer
    for row in source.rows:
        for name, kind in TEXTS.items():
            if found := row.settings.get(kind):
                texts.setdefault(f"{title_of(str(row.settings.get(name)))} ({kind})", {})[found] = None
    sessions = [
        {
            "command": command_of(session) or shlex.join(map(str, session.get("command", []))),
            "details": list(_in_words({name: value for name, value in session.items() if name != "command"})),
        }
        for session in header["sessions"]
    ]
    long = "tasks", "config", CONTENTS
    models = {
        name: {key: value for key, value in of.items() if key not in long} for name, of in header["models"].items()
    }
    settings = {name: value for name, value in header["settings"].items() if name != "tasks"}
    return {
        "name": source.name,
        "rows": len(source.rows),
        "settings": [("tasks", ", ".join(header["settings"]["tasks"])), *_in_words(settings)],
        "models": [(name, list(_in_words(identity))) for name, identity in models.items()],
        "texts": [(name, ", ".join(hashes)) for name, hashes in texts.items()],
        "sessions": sessions,
    }


def _in_words(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the single values of nested settings as texts, each with its name, without empty ones."""
    for name, value in flat(values):
        if value not in (None, [], ""):
            yield name, ", ".join(str(item) for item in value) if isinstance(value, list) else title_of(str(value))
