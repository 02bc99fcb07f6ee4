"""Tables of quality by model, method and length, for a terminal and as files of a run folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from farspan.files import write
from farspan.report.cells import Cell, by_member, by_task, failures
from farspan.report.export import markdown_table, plain, quality_table, write_csv
from farspan.report.runs import short_names
from farspan.stats import LEAST_PAIRS, LEVEL
from farspan.terminal import Terminal

COSTS = ("tok/s in", "tok/s out", "weights + context + activations")
MARKS = {"win": "▲", "loss": "▼", "tie": "=", "": ""}


def comparison(found: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of the table of one task: quality at each length, and the costs at the longest measured."""
    lengths = sorted({cell.length for cell in found})
    head = ["model", "method", *(f"{length:,}" for length in lengths), "W/T/L"]
    costs = any(cell.prefill_rate is not None for cell in found)
    head += COSTS if costs else []
    short = short_names({cell.model for cell in found})
    table = []
    for mine in by_member(found):
        at = {cell.length: cell for cell in mine}
        verdicts = [cell.verdict for cell in mine]
        counted = "/".join(str(verdicts.count(verdict)) for verdict in ("win", "tie", "loss"))
        line = [short[mine[0].model], mine[0].method, *(_marked(at[length]) for length in lengths)]
        line.append(counted if any(verdicts) else "baseline" if mine[0] is found[0] else "")
        table.append(line + (costs_of(mine) if costs else []))
    return head, table


def costs_of(mine: Sequence[Cell]) -> list[str]:
    """Return tokens read and generated per second, and memory, of one member at its longest length with costs."""
    last = max((cell for cell in mine if cell.prefill_rate is not None), key=lambda cell: cell.length, default=mine[-1])
    memory = _bytes(last.weight_bytes, last.context_bytes, last.activation_bytes)
    return [_rate(last.prefill_rate), _rate(last.decode_rate), memory]


def legend(found: Sequence[Cell]) -> str:
    """Return what the marks of a comparison mean."""
    costs = [cell.length for cell in found if cell.prefill_rate is not None]
    first = f"▲ better, ▼ worse than the first line, = neither: paired over the same examples, p < {LEVEL} after Holm"
    if any(0 < cell.pairs < LEAST_PAIRS for cell in found):
        first += f"; no verdict with fewer than {LEAST_PAIRS} shared examples"
    at = f"; cost at {max(costs):,} tokens: read (in) and generated (out) per second, memory" if costs else ""
    return f"{first}; W/T/L: wins, ties, losses{at}"


def print_comparison(found: Sequence[Cell], console: Terminal) -> None:
    """Print a table for each task."""
    for group in by_task(found):
        head, table = comparison(group)
        title = f"{group[0].task}: {group[0].quality} by {group[0].unit}"
        shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for name in head:
            shown.add_column(name, justify="left" if name in ("model", "method") else "right", overflow="fold")
        for line in table:
            shown.add_row(*line)
        console.print(shown)
        console.print(legend(group), style="dim", highlight=False)


def direction(quality: Mapping[str, Any]) -> str:
    """Return which values of a quality are better."""
    better = quality["higher_is_better"]
    return "" if better is None else f" ({'higher' if better else 'lower'} is better)"


def print_quality(found: Sequence[Cell], quality: Mapping[str, Any], console: Terminal) -> None:
    """Print a line for each model, method and length of one task."""
    title = f"{found[0].task}: {quality['name']}{direction(quality)}, 95 % interval over examples"
    table = Table(title=title, title_justify="left")
    details = list(dict.fromkeys(name for one in found for name in one.details))
    several = len({one.model for one in found}) > 1, len({one.method for one in found}) > 1
    short = short_names(one.model for one in found)
    failed = any(one.statuses for one in found)
    for column in [name for name, shown in zip(("model", "method"), several, strict=True) if shown]:
        table.add_column(column, overflow="fold")
    names = (name.replace("_", " ") for name in details)
    columns = (found[0].unit, quality["name"], *names, "examples", "tokens/s", "kept")
    for column in (*columns, *(["failed"] if failed else [])):
        table.add_column(column, justify="right")
    for one in found:
        if not one.n and not one.statuses:
            continue
        line = [short[one.model]] if several[0] else []
        line += [one.method] if several[1] else []
        interval = "" if one.low is None or one.high is None else f" [{_number(one.low)}, {_number(one.high)}]"
        line += [f"{one.length:,}", _number(one.value) + interval]
        line += [_number(one.details.get(name)) for name in details]
        line += [str(one.n), *("" if x is None else _rate(x) for x in (one.tokens_per_second, one.kept))]
        line += [", ".join(f"{count} {status}" for status, count in one.statuses.items())] if failed else []
        table.add_row(*line)
    console.print(table)


def write_comparison(found: Sequence[Cell], folder: str | Path) -> list[Path]:
    """Write compare.md, the tables, and compare.csv, a line for each cell; returns their paths."""
    text: list[str] = []
    for group in by_task(found):
        text += [f"## {plain(group[0].task)}: {group[0].quality} by {group[0].unit}", ""]
        text += [*markdown_table(*comparison(group)), legend(group), ""]
    text += [f"- {plain(line)}" for line in failures(found)]
    path = Path(folder) / "compare.md"
    write(path, "\n".join(text).rstrip() + "\n")
    return [path, write_csv(Path(folder) / "compare.csv", quality_table(found))]


def _marked(cell: Cell) -> str:
    if cell.value is None:
        return cell.failed or "-"
    number = f"{cell.value:,.2f}" if cell.value >= 10 else f"{cell.value:.3f}"
    return f"{number} {MARKS[cell.verdict]}".strip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:,.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _bytes(*parts: float | None) -> str:
    """Return parts of one memory in one unit."""
    known = [part for part in parts if part is not None]
    if not known:
        return "-"
    size, unit = (2**30, "GiB") if max(known) >= 2**30 else (2**20, "MiB")
    return " + ".join("?" if part is None else f"{part / size:,.1f}" for part in parts) + f" {unit}"
