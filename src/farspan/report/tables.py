"""Tables of quality by model, method and length, for a terminal and as files of a run folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.files import write
from farspan.report.cells import Cell, by_member, by_task, failures
from farspan.report.export import markdown_table, number, plain, quality_table, with_interval, write_csv
from farspan.report.runs import short_names
from farspan.stats import LEAST_PAIRS, LEVEL
from farspan.terminal import Terminal

COSTS = ("tok/s in", "tok/s out", "weights + context + activations")
MARKS = {"win": "▲", "loss": "▼", "tie": "=", "": ""}


def comparison(found: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of the table of one task: quality at each length, and the costs at the longest measured."""
    lengths = sorted({cell.length for cell in found})
    costs = any(cell.prefill_rate is not None for cell in found)
    head = ["model", "method", *(f"{length:,}" for length in lengths), *last_columns(True, costs)]
    short = short_names({cell.model for cell in found})
    lines = [
        [short[mine[0].model], mine[0].method, *map(marked, mine), *last_cells(mine, found, True, costs)]
        for mine in by_member(found)
    ]
    return head, lines


def last_columns(compared: bool, costs: bool) -> list[str]:
    """Return the head of the columns after the lengths."""
    return [*(["W/T/L"] if compared else []), *(COSTS if costs else ())]


def last_cells(mine: Sequence[Cell], found: Sequence[Cell], compared: bool, costs: bool) -> list[str]:
    """Return the cells of those columns: wins, ties and losses, and costs at the longest length that has them.

    Args:
        mine: the cells of one member.
        found: those of all members; the first is the baseline.
    """
    verdicts = [cell.verdict for cell in mine]
    counts = "/".join(str(verdicts.count(verdict)) for verdict in ("win", "tie", "loss"))
    cells = [counts if any(verdicts) else "baseline" if mine[0] is found[0] else ""] if compared else []
    return [*cells, *(costs_of(mine) if costs else [])]


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
        console.print_table(f"{group[0].task}: {group[0].quality} by {group[0].unit}", *comparison(group), num_names=2)
        console.print(legend(group), style="dim", highlight=False)


def direction(quality: Mapping[str, Any]) -> str:
    """Return which values of a quality are better."""
    better = quality["higher_is_better"]
    return "" if better is None else f" ({'higher' if better else 'lower'} is better)"


def print_quality(found: Sequence[Cell], quality: Mapping[str, Any], console: Terminal) -> None:
    """Print a line for each model, method and length of one task."""
    several = len({one.model for one in found}) > 1, len({one.method for one in found}) > 1
    short = short_names(one.model for one in found)
    details = list(dict.fromkeys(name for one in found for name in one.details))
    failed = any(one.statuses for one in found)
    lines: list[dict[str, str]] = []
    for one in found:
        if one.n or one.statuses:
            line = {"model": short[one.model]} if several[0] else {}
            line |= {"method": one.method} if several[1] else {}
            line |= {one.unit: f"{one.length:,}", quality["name"]: with_interval(one.value, one.low, one.high)}
            line |= {name.replace("_", " "): number(one.details.get(name)) for name in details}
            rates = {"tokens/s": one.tokens_per_second, "kept": one.kept}
            line |= {"examples": str(one.n), **{name: "" if x is None else _rate(x) for name, x in rates.items()}}
            line |= {"failed": ", ".join(f"{n} {status}" for status, n in one.statuses.items())} if failed else {}
            lines.append(line)
    title = f"{found[0].task}: {quality['name']}{direction(quality)}, 95 % interval over examples"
    console.print_table(title, lines[0], [list(line.values()) for line in lines], num_names=sum(several))


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


def marked(cell: Cell, write: Callable[[float], str] = number) -> str:
    """Return the quality of a cell with the mark of its verdict, or its status."""
    if cell.value is None:
        return cell.failed or "-"
    return f"{write(cell.value)} {MARKS[cell.verdict]}".strip()


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _bytes(*parts: float | None) -> str:
    """Return parts of one memory in one unit."""
    known = [part for part in parts if part is not None]
    if not known:
        return "-"
    size, unit = (2**30, "GiB") if max(known) >= 2**30 else (2**20, "MiB")
    return " + ".join("?" if part is None else f"{part / size:,.1f}" for part in parts) + f" {unit}"
