"""Tables of quality by model, method and length, for a terminal and as files of a run folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.files import write
from farspan.report.cells import NOT_SHOWN, Cell, by_member, by_task, failures
from farspan.report.export import (
    bounds,
    capitalised,
    length_in,
    markdown_table,
    memory_size,
    number,
    plain,
    quality_of,
    quality_table,
    write_csv,
    written_as,
)
from farspan.report.figure import sample_size
from farspan.report.runs import short_names
from farspan.stats import LEAST_PAIRS, LEVEL
from farspan.terminal import Terminal

COSTS = ("tokens", "tok/s in", "tok/s out", "weights + context + activations")
SERVER_COSTS = ("tokens", "requests", "prompt tokens", "from the cache")
COST_TITLES = {  # by the costs in the table
    COSTS: "cost at the longest length measured, medians: tokens read (in) and generated (out) per second, and memory",
    SERVER_COSTS: "cost on the server at the longest length measured: requests and prompt tokens of a row, and how "
    "many came from its cache",
}
FURTHER = "number of examples with a result, and means of further scores"
FEW = 8  # examples, whose intervals are wide: Student's quantile is above 2.4
MORE = f"; intervals of fewer than {FEW} examples are wide: measure more (--repeats)"
MARKS = {"win": "▲", NOT_SHOWN: "·", "loss": "▼", "": ""}
WINS = "/".join(filter(None, MARKS.values()))
Head = list[str]
Lines = list[list[str]]


def comparison(found: Sequence[Cell]) -> tuple[Head, Lines]:
    """Return head and lines of the table of one task: quality at each length, its interval in a line below it, and how
    often the member is better, not shown to differ, and worse."""
    lengths = sorted({cell.length for cell in found})
    head = ["model", "method", *(f"{length:,}" for length in lengths), WINS]

    def quality(cell: Cell) -> str:
        return f"{marked(cell)}\n{bounds(cell.low, cell.high, written_as(cell))}".rstrip()

    return head, [[*_names(mine, found), *map(quality, mine), wins(mine, found)] for mine in by_member(found)]


def _title(found: Sequence[Cell]) -> str:
    """Return the title of the table of one task, which names the sample size."""
    first, size = found[0], sample_size((cell.n for cell in found if cell.n), "example")
    return "; ".join(filter(None, (f"{first.task}: {first.quality} by {length_in(first.unit)}", size)))


def further_scores(found: Sequence[Cell]) -> tuple[Head, Lines]:
    """Return head and lines of a table of one task: how many examples have a result, and the mean of each further
    score, by length. No lines if it has no further scores and every row has a result."""
    head = ["model", "method", "", *(f"{length:,}" for length in sorted({cell.length for cell in found}))]
    names = list(dict.fromkeys(name for cell in found for name in cell.details))
    lines = []
    for mine in by_member(found) if names or any(cell.statuses for cell in found) else ():
        lines.append([*_names(mine, found), "examples", *(f"{cell.n:,}" for cell in mine)])
        for name in names:
            values = [number(cell.details.get(name)) for cell in mine]
            lines.append([*_names(mine, found), name.replace("_", " "), *values])
    return head, lines


def cost_tables(found: Sequence[Cell]) -> list[tuple[str, Head, Lines]]:
    """Return title, head and lines of each task's tables of costs; tasks with the same costs share one. A member
    without costs is left out, or has the status of its failed rows; `failures` has the reason."""
    tables: list[tuple[str, Head, Lines]] = []
    for group in by_task(found):
        members = by_member(group)
        for columns, of in ((COSTS, costs_of), (SERVER_COSTS, server_costs_of)):
            costs, none = [of(mine) for mine in members], ["-"] * (len(columns) - 1)
            lines = [
                [*_names(mine, group), *(known or [failed, *none])]
                for mine, known in zip(members, costs, strict=True)
                if known or (failed := _failed(mine))
            ]
            table = COST_TITLES[columns], ["model", "method", *columns], lines
            if any(costs) and table not in tables:
                tables.append(table)
    return tables


def _failed(mine: Sequence[Cell]) -> str:
    """Return the status of a member without costs, whose rows failed; "" of others, such as on a server."""
    whole = all(cell.value is None for cell in mine)
    statuses = [cell.cost_failed or (cell.failed if whole and cell.has_failed else "") for cell in mine]
    return next((f"failed: {status}" for status in statuses if status), "")


def _names(mine: Sequence[Cell], found: Sequence[Cell]) -> list[str]:
    return [short_names({cell.model for cell in found})[mine[0].model], mine[0].method]


def wins(mine: Sequence[Cell], found: Sequence[Cell]) -> str:
    """Return how often one member is better, not shown to differ, and worse.

    Args:
        mine: the cells of one member.
        found: the cells of all members; the first is the baseline.
    """
    verdicts = [cell.verdict for cell in mine]
    counts = "/".join(str(verdicts.count(verdict)) for verdict in MARKS if verdict)
    return counts if any(verdicts) else "baseline" if mine[0] is found[0] else ""


def costs_of(mine: Sequence[Cell]) -> list[str]:
    """Return the longest length with speeds of one member, and its speeds and memory there; empty if it has none."""
    last = _longest_with("prefill_rate", mine)
    if last is None:
        return []
    parts = (last.weight_bytes, last.context_bytes, last.activation_bytes)
    known = any(part is not None for part in parts)
    memory = " + ".join("?" if part is None else memory_size(part) for part in parts) if known else "-"
    return [f"{last.length:,}", _rate(last.prefill_rate), _rate(last.decode_rate), memory]


def server_costs_of(mine: Sequence[Cell]) -> list[str]:
    """Return the longest length of a served member, and the server's work there; empty if it is not served."""
    last = _longest_with("requests", mine)
    if last is None:
        return []
    cached = "not reported" if last.cached_share is None else f"{last.cached_share:.1%}"
    return [f"{last.length:,}", f"{last.requests:,.0f}", _rate(last.prompt_tokens), cached]


def _longest_with(cost: str, mine: Sequence[Cell]) -> Cell | None:
    """Return the cell of one member at its longest length with a cost."""
    return max((cell for cell in mine if getattr(cell, cost) is not None), key=lambda cell: cell.length, default=None)


def legend(found: Sequence[Cell]) -> str:
    """Return what the marks of a comparison mean."""
    marks = "▲ better, ▼ worse than the baseline, the first line, · no difference shown"
    first = f"{marks}: paired over the same examples, p < {LEVEL} after Holm"
    if any(0 < cell.pairs < LEAST_PAIRS for cell in found):
        first += f"; no verdict with fewer than {LEAST_PAIRS} shared examples"
    first += unpaired(found)
    return f"{first}; {WINS}: how many of each{MORE if any(0 < cell.n < FEW for cell in found) else ''}"


def unpaired(found: Sequence[Cell]) -> str:
    """Return why cells with a result have no mark beside one of the baseline; "" if there are none."""
    known = {cell.length for cell in found if cell.whose == found[0].whose and cell.value is not None}
    others = (cell for cell in found if cell.whose != found[0].whose and cell.value is not None)
    if all(cell.pairs for cell in others if cell.length in known):
        return ""
    return "; no mark without shared examples, as of models with another tokenizer than the baseline"


def print_comparison(found: Sequence[Cell], console: Terminal) -> None:
    """Print the tables of each task."""
    for group in by_task(found):
        console.print_table(_title(group), *comparison(group), num_names=2)
        console.print(legend(group), style="dim", highlight=False)
        head, lines = further_scores(group)
        if lines:
            console.print_table(FURTHER, head, lines, num_names=3)


def print_costs(found: Sequence[Cell], console: Terminal) -> None:
    for table in cost_tables(found):
        console.print_table(*table, num_names=2)


def with_direction(quality: Mapping[str, Any]) -> str:
    """Return the name of a quality and which values are better, in one bracket: copied (mean, higher is better)."""
    name, better = quality["name"], quality["higher_is_better"]
    if better is None:
        return str(name)
    begin = f"{name.removesuffix(')')}, " if name.endswith(")") else f"{name} ("
    return f"{begin}{'higher' if better else 'lower'} is better)"


def print_quality(found: Sequence[Cell], quality: Mapping[str, Any], console: Terminal) -> None:
    """Print a line for each model, method and length of one task."""
    several = len({one.model for one in found}) > 1, len({one.method for one in found}) > 1
    short = short_names(one.model for one in found)
    details = list(dict.fromkeys(name for one in found for name in one.details))
    missing = any(one.statuses for one in found)
    lines: list[dict[str, str]] = []
    for one in found:
        if one.n or one.statuses:
            line = {"model": short[one.model]} if several[0] else {}
            line |= {"method": one.method} if several[1] else {}
            line |= {one.unit: f"{one.length:,}", quality["name"]: quality_of(one)}
            line |= {name.replace("_", " "): number(one.details.get(name)) for name in details}
            rates = {"tokens/s": one.tokens_per_second, "kept": one.kept}
            line |= {"examples": str(one.n), **{name: "" if x is None else _rate(x) for name, x in rates.items()}}
            line |= {"missing": ", ".join(f"{n} {status}" for status, n in one.statuses.items())} if missing else {}
            lines.append(line)
    title = f"{found[0].task}: {with_direction(quality)}, 95 % interval over examples"
    names = sum(several)
    console.print_table(title, lines[0], [list(line.values()) for line in lines], num_names=names, num_keys=names + 1)


def write_comparison(found: Sequence[Cell], folder: str | Path, notes: Sequence[str] = ()) -> list[Path]:
    """Write compare.md, the tables after some notes, and compare.csv, a line for each cell; returns their paths."""
    text = [line for note in notes for line in (plain(note), "")]
    for group in by_task(found):
        text += [f"## {plain(_title(group))}", ""]
        text += [*markdown_table(*comparison(group)), legend(group), ""]
        head, lines = further_scores(group)
        if lines:
            text += [f"{capitalised(FURTHER)}:", "", *markdown_table(head, lines)]
    for title, head, lines in cost_tables(found):
        text += [f"## {plain(capitalised(title))}", "", *markdown_table(head, lines)]
    text += [f"- {plain(line)}" for line in failures(found)]
    path = Path(folder) / "compare.md"
    write(path, "\n".join(text).rstrip() + "\n")
    return [path, write_csv(Path(folder) / "compare.csv", quality_table(found))]


def marked(cell: Cell) -> str:
    """Return the quality of a cell with the mark of its verdict, or its status."""
    if cell.value is None:
        return cell.failed or "-"
    return f"{written_as(cell)(cell.value)} {MARKS[cell.verdict]}".strip()


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
