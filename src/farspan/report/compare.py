"""A comparison from its rows: who is better at what, by how much, and at which cost; as tables, CSV and a picture.

The first model under the first method is the baseline. A cell is one model under one method at one task and length.
It wins or loses where the mean difference from the baseline over the same examples is not 0 (p of the paired t test
below 0.05 after Holm's correction over all cells of the task), and ties otherwise. Examples of models with another
tokenizer are other tokens: such cells have no verdict.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure  # not pyplot, which would choose the backend of the whole program
from matplotlib.ticker import LogLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from farspan.files import write, written
from farspan.record import Row, latest
from farspan.report.export import plain
from farspan.report.picture import COLOURS, saved
from farspan.report.tables import short_names
from farspan.stats import LEAST_PAIRS, LEVEL, holm, student_mean

PRICES = {"seconds": "seconds to the first token", "memory": "memory above the model (MiB)"}
DECADE = 10  # costs further apart are drawn on a logarithmic axis
MARKS = {"win": "▲", "loss": "▼", "tie": "=", "": ""}


@dataclass(frozen=True)
class Cell:
    """One model under one method at one task and length. Bytes and rates are medians; None where not measured."""

    model: str
    method: str
    task: str  # as it was asked for
    length: int
    unit: str  # of the length
    quality: str  # what `value` is
    exp: bool  # of the mean over examples
    n: int = 0  # examples
    value: float | None = None  # mean over examples
    low: float | None = None  # its 95 % interval
    high: float | None = None
    pairs: int = 0  # examples that the baseline was asked for as well
    difference: float | None = None  # from the baseline, in the unit of the score (nats for perplexity)
    difference_low: float | None = None  # its 95 % interval
    difference_high: float | None = None
    p: float | None = None
    p_holm: float | None = None  # corrected over the task's cells
    verdict: str = ""  # win, tie, loss; "" of the baseline and where nothing is paired
    failed: str = ""  # status of the rows that failed
    reason: str = ""
    prefill_rate: float | None = None  # tokens per second
    decode_rate: float | None = None
    prefill_seconds: float | None = None  # to the first new token
    weight_bytes: float | None = None
    context_bytes: float | None = None
    activation_bytes: float | None = None


COSTS = ("prefill_rate", "decode_rate", "prefill_seconds", "weight_bytes", "context_bytes", "activation_bytes")


def cells(rows: Iterable[Row], header: Mapping[str, Any]) -> list[Cell]:
    """All cells of a comparison, task by task, in the order in which they were asked for.

    Args:
        header: run.json of the run.
    """
    by_key: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in latest(rows):
        by_key.setdefault((row.model, row.method, _asked(row, header), row.length), []).append(row)
    models, methods = list(header["models"]), header["settings"]["methods"]
    found: list[Cell] = []
    for asked, what in header["settings"]["questions"].items():
        lengths = sorted({length for *_, task, length in by_key if task == asked})
        of_task = []
        for model in models:
            for method in methods:
                for length in lengths:
                    quality = what["quality"]
                    cell = Cell(model, method, asked, length, what["unit"], quality["name"], quality["exp"])
                    mine = by_key.get((model, method, asked, length), [])
                    base = by_key.get((models[0], methods[0], asked, length), [])
                    cost = by_key.get((model, method, "", length), []) if what["unit"] == "tokens" else []
                    of_task.append(_cell(cell, mine, base, cost, quality))
        for cell, corrected in zip(of_task, holm([cell.p for cell in of_task]), strict=True):
            verdict = _verdict(cell, corrected, what["quality"]["higher_is_better"])
            found.append(replace(cell, p_holm=corrected, verdict=verdict))
    return found


def _asked(row: Row, header: Mapping[str, Any]) -> str:
    """The question a row answers, as it was asked for; "" for cost."""
    questions = header["models"].get(row.model, {}).get("questions", {})
    names = [asked for asked, settings in questions.items() if settings == row.settings]
    return next((name for name in names if name.partition(":")[0] == row.task), names[0] if names else "")


def _cell(
    cell: Cell, mine: Sequence[Row], base: Sequence[Row], cost: Sequence[Row], quality: Mapping[str, Any]
) -> Cell:
    good = _scores(mine, quality["score"])
    failed = [row for row in mine if row.status != "ok" and (row.status != "refused" or not good)]
    if failed:
        cell = replace(cell, failed=failed[0].status, reason=failed[0].reason)
    if good:
        values = np.array(list(good.values()))
        numbers = student_mean(values)[:3]
        value, low, high = (_finite(np.exp(number) if quality["exp"] else number) for number in numbers)
        if np.ptp(values) == 0:  # scores that are all the same do not show how far their mean may be off
            low = high = None
        cell = replace(cell, n=len(good), value=value, low=low, high=high)
        theirs = _scores(base, quality["score"])
        if mine and base and (mine[0].model, mine[0].method) != (base[0].model, base[0].method):
            shared = [key for key in good if key in theirs]
            differences = np.array([good[key] - theirs[key] for key in shared])
            difference, low, high, p = map(_finite, student_mean(differences))
            cell = replace(
                cell, pairs=len(shared), difference=difference, difference_low=low, difference_high=high, p=p
            )
    measured = [row.scores for row in cost if row.status == "ok"]
    costs: dict[str, Any] = {}
    for name in COSTS:
        known = [scores[name] for scores in measured if scores.get(name) is not None]
        costs[name] = float(np.median(known)) if known else None
    return replace(cell, **costs)


def _scores(rows: Sequence[Row], score: str) -> dict[tuple[str, float], float]:
    """By example and depth."""
    good = (row for row in rows if row.status == "ok" and row.scores.get(score) is not None)
    return {(row.example, row.depth): float(row.scores[score]) for row in good}


def _verdict(cell: Cell, corrected: float | None, higher_is_better: bool) -> str:
    if corrected is None or cell.difference is None:
        return ""
    if corrected >= LEVEL:
        return "tie"
    return "win" if (cell.difference > 0) == higher_is_better else "loss"


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


# tables


def lines(found: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of one task: quality at each length, and the costs at the longest measured."""
    lengths = sorted({cell.length for cell in found})
    head = ["model", "method", *(f"{length:,}" for length in lengths), "W/T/L"]
    costs = any(cell.prefill_rate is not None for cell in found)
    head += ["tok/s in", "tok/s out", "weights + context + activations"] if costs else []
    by_line: dict[tuple[str, str], list[Cell]] = {}
    for cell in found:
        by_line.setdefault((cell.model, cell.method), []).append(cell)
    short = short_names({model for model, _ in by_line})
    table = []
    for (model, method), mine in by_line.items():
        at = {cell.length: cell for cell in mine}
        verdicts = [cell.verdict for cell in mine]
        counted = "/".join(str(verdicts.count(verdict)) for verdict in ("win", "tie", "loss"))
        line = [short[model], method, *(_said(at[length]) for length in lengths)]
        line.append(counted if any(verdicts) else "baseline" if mine[0] is found[0] else "")
        if costs:
            last = max((c for c in mine if c.prefill_rate is not None), key=lambda c: c.length, default=mine[-1])
            line += [_rate(last.prefill_rate), _rate(last.decode_rate)]
            line.append(_bytes(last.weight_bytes, last.context_bytes, last.activation_bytes))
        table.append(line)
    return head, table


def legend(found: Sequence[Cell]) -> str:
    """What the marks of a table mean."""
    costs = [cell.length for cell in found if cell.prefill_rate is not None]
    first = f"▲ better, ▼ worse than the first line, = neither: paired over the same examples, p < {LEVEL} after Holm"
    if any(0 < cell.pairs < LEAST_PAIRS for cell in found):
        first += f"; no verdict with fewer than {LEAST_PAIRS} shared examples"
    at = f"; cost at {max(costs):,} tokens: read (in) and generated (out) per second, memory" if costs else ""
    return f"{first}; W/T/L: wins, ties, losses{at}"


def print_comparison(found: Sequence[Cell], console: Console) -> None:
    """Print a table for each task."""
    for group in by_task(found):
        head, table = lines(group)
        title = f"{group[0].task}: {group[0].quality} by {group[0].unit}"
        shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for name in head:
            shown.add_column(name, justify="left" if name in ("model", "method") else "right", overflow="fold")
        for line in table:
            shown.add_row(*line)
        console.print(shown)
        console.print(legend(group), style="dim", highlight=False)


def failures(found: Sequence[Cell]) -> list[str]:
    """A line for each model, method and task with cells that failed."""
    lengths: dict[tuple[str, str, str, str, str], list[int]] = {}
    for cell in found:
        if cell.failed:
            lengths.setdefault((cell.model, cell.method, cell.task, cell.failed, cell.reason), []).append(cell.length)
    return [
        f"{model} {method}, {task} at {', '.join(f'{length:,}' for length in at)}: {status}: {reason}"
        for (model, method, task, status, reason), at in lengths.items()
    ]


def write_tables(found: Sequence[Cell], folder: str | Path) -> list[Path]:
    """compare.md, the tables, and compare.csv, a line for each cell with all its numbers; returns their paths."""
    text: list[str] = []
    for group in by_task(found):
        head, table = lines(group)
        drawn = ["| " + " | ".join(plain(cell) for cell in line) + " |" for line in [head, *table]]
        text += [f"## {plain(group[0].task)}: {group[0].quality} by {group[0].unit}", ""]
        text += [drawn[0], "|" + "---|" * len(head), *drawn[1:], "", legend(group), ""]
    text += [f"- {plain(line)}" for line in failures(found)]
    paths = [Path(folder) / name for name in ("compare.md", "compare.csv")]
    write(paths[0], "\n".join(text).rstrip() + "\n")
    with written(paths[1]) as beside, beside.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Cell)])
        writer.writeheader()
        writer.writerows({field.name: getattr(cell, field.name) for field in fields(Cell)} for cell in found)
    return paths


def by_task(found: Sequence[Cell]) -> list[list[Cell]]:
    tasks: dict[str, list[Cell]] = {}
    for cell in found:
        tasks.setdefault(cell.task, []).append(cell)
    return list(tasks.values())


# picture


def draw_comparison(found: Sequence[Cell], folder: str | Path) -> list[Path]:
    """Quality against cost into compare.png and .svg; returns the two paths, none where no cost was measured. A row for
    each task, at the longest length that most of its lines measured: against the seconds to the first token, and
    against the memory above the model."""
    groups = [chosen for group in by_task(found) if (chosen := at_longest_shared(group))]
    if not groups:
        return []
    names = list(dict.fromkeys((cell.model, cell.method) for cell in found))
    short = short_names({model for model, _ in names})
    several = len(short) > 1
    figure = Figure(figsize=(10, 4.2 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for axes_of_task, group in zip(panels, groups, strict=True):
        for axes, (name, what) in zip(axes_of_task, PRICES.items(), strict=True):
            for cell in group:
                cost = cost_of(cell, name)
                if cost is None or cell.value is None:
                    continue
                colour = COLOURS[names.index((cell.model, cell.method)) % len(COLOURS)]
                spread = (
                    None
                    if cell.low is None or cell.high is None
                    else [[cell.value - cell.low], [cell.high - cell.value]]
                )
                label = f"{short[cell.model]} {cell.method}" if several else cell.method
                axes.errorbar(
                    [cost], [cell.value], yerr=spread, fmt="o", color=colour,
                    capsize=3, label=label,
                )  # fmt: skip
            ends = [value for cell in group if (value := cost_of(cell, name))]
            if ends and max(ends) > DECADE * min(ends):
                axes.set_xscale("log")
            else:
                axes.set_xlim(0, 1.1 * max(ends, default=1))
            axes.set(xlabel=what, ylabel=group[0].quality, yscale="log" if group[0].exp else "linear")
            axes.yaxis.set_major_formatter("{x:,.3g}")
            if group[0].exp:
                axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
                axes.yaxis.set_minor_formatter("{x:,.3g}")
            axes.grid(alpha=0.25)
        axes_of_task[0].set_title(f"{group[0].task} at {group[0].length:,} {group[0].unit}", loc="left", fontsize=10)
        axes_of_task[1].legend(fontsize=8)
    return saved(figure, Path(folder), "compare")


def cost_of(cell: Cell, price: str) -> float | None:
    """One of PRICES."""
    if price == "seconds":
        return cell.prefill_seconds
    if cell.context_bytes is None or cell.activation_bytes is None:
        return None
    return (cell.context_bytes + cell.activation_bytes) / 2**20


def at_longest_shared(group: Sequence[Cell]) -> list[Cell]:
    """The cells of the longest length at which the most lines have a value and a cost."""
    known = [cell for cell in group if cell.value is not None and cell.prefill_seconds is not None]
    counts = {length: sum(cell.length == length for cell in known) for length in {cell.length for cell in known}}
    if not counts:
        return []
    longest = max(length for length, count in counts.items() if count == max(counts.values()))
    return [cell for cell in known if cell.length == longest]


def _said(cell: Cell) -> str:
    if cell.value is None:
        return cell.failed or "-"
    number = f"{cell.value:,.2f}" if cell.value >= 10 else f"{cell.value:.3f}"
    return f"{number} {MARKS[cell.verdict]}".strip()


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _bytes(*parts: float | None) -> str:
    """Parts of one memory in one unit."""
    known = [part for part in parts if part is not None]
    if not known:
        return "-"
    size, unit = (2**30, "GiB") if max(known) >= 2**30 else (2**20, "MiB")
    return " + ".join("?" if part is None else f"{part / size:,.1f}" for part in parts) + f" {unit}"
