"""The quality of a task by length: the numbers of rows with intervals over examples, as a table and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from farspan.record import Row, latest
from farspan.report.tables import short_names
from farspan.stats import bands, interval

if TYPE_CHECKING:  # tasks import torch
    from farspan.tasks.base import Quality


@dataclass(frozen=True)
class Cell:
    """What one model under one method reached at one length."""

    model: str
    method: str
    length: int  # in the unit of the task
    value: float | None  # mean over examples, exp of it for a perplexity; None: no good row
    low: float | None  # its 95 % interval; None under two examples
    high: float | None
    details: dict[str, float]  # means of other scores
    num_examples: int
    context: float | None  # tokens of the whole prompt, mean
    tokens_per_second: float | None
    kept: float | None  # tokens held, mean
    peak_bytes: int
    failed: dict[str, int]  # rows by status


def cells(rows: Iterable[Row], quality: "Quality", details: Sequence[str] = ()) -> list[Cell]:
    """A cell for each model, method and length among the rows, in the order they come, lengths ascending."""
    groups: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for row in latest(rows):
        groups.setdefault((row.model, row.method), {}).setdefault(row.length, []).append(row)
    return [_cell(group, quality, details) for by in groups.values() for _, group in sorted(by.items())]


def _cell(rows: Sequence[Row], quality: "Quality", details: Sequence[str]) -> Cell:
    good = [row for row in rows if row.status == "ok"]

    def mean(values: Iterable[float]) -> float | None:
        found = list(values)
        return float(np.mean(found)) if found else None

    if lacking := [row for row in good if row.scores.get(quality.score) is None]:
        row = lacking[0]
        raise ValueError(
            f"the row of {row.model} {row.method}, length {row.length:,}, repeat {row.repeat} has no score "
            f"{quality.score!r}: delete it from rows.jsonl to measure it again"
        )
    values = np.array([row.scores[quality.score] for row in good], float)
    value, (low, high) = mean(values), _interval(values, quality)
    if quality.exp:
        value, low, high = (None if number is None else float(np.exp(number)) for number in (value, low, high))
    failed = [row.status for row in rows if row.status != "ok"]
    seconds = sum(row.seconds for row in good)
    context = mean(row.scores["context"] for row in good if "context" in row.scores)
    means = {name: mean(row.scores[name] for row in good if name in row.scores) for name in details}
    return Cell(
        model=rows[0].model,
        method=rows[0].method,
        length=rows[0].length,
        value=value,
        low=low,
        high=high,
        details={name: number for name, number in means.items() if number is not None},
        num_examples=len(good),
        context=context,
        tokens_per_second=context * len(good) / seconds if context and seconds else None,
        kept=mean(row.num_kept for row in good),
        peak_bytes=max(row.peak_bytes for row in rows),
        failed={status: failed.count(status) for status in sorted(set(failed))},
    )


def _interval(values: np.ndarray, quality: "Quality") -> tuple[float | None, float | None]:
    """The 95 % interval of a mean over examples: Wilson's where each is right or wrong, else Student's, of shares
    inside 0 to 1. None under two examples, and where graded scores are all the same: their spread is unknown."""
    if len(values) < 2 or (quality.graded and np.ptp(values) == 0):
        return None, None
    if not quality.graded and np.isin(values, (0.0, 1.0)).all():
        found = binomtest(int(values.sum()), len(values)).proportion_ci(method="wilson")
        return float(found.low), float(found.high)
    shares = not quality.exp and values.min() >= 0 and values.max() <= 1
    low, high = (side[0] for side in (bands if shares else interval)(values[:, None]))
    return float(low), float(high)


def as_data(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Cells ready for JSON."""
    return [{name: _rounded(value) for name, value in vars(one).items()} for one in found]


def print_quality(found: Sequence[Cell], task: str, quality: "Quality", unit: str, console: Console) -> None:
    """A line for each model, method and length."""
    direction = "higher is better" if quality.higher_is_better else "lower is better"
    title = f"{task}: {quality.name} ({direction}), 95 % interval over examples"
    table = Table(title=title, title_justify="left")
    details = list(dict.fromkeys(name for one in found for name in one.details))
    several = len({one.model for one in found}) > 1, len({one.method for one in found}) > 1
    short = short_names(one.model for one in found)
    failed = any(one.failed for one in found)
    for column in [name for name, shown in zip(("model", "method"), several, strict=True) if shown]:
        table.add_column(column, overflow="fold")
    columns = (unit, quality.name, *(name.replace("_", " ") for name in details), "examples", "tokens/s", "kept")
    for column in (*columns, *(["failed"] if failed else [])):
        table.add_column(column, justify="right")
    for one in found:
        line = [short[one.model]] if several[0] else []
        line += [one.method] if several[1] else []
        interval_said = "" if one.low is None or one.high is None else f" [{_said(one.low)}, {_said(one.high)}]"
        line += [f"{one.length:,}", _said(one.value) + interval_said]
        line += [_said(one.details.get(name)) for name in details]
        line += [str(one.num_examples), *(_whole(value) for value in (one.tokens_per_second, one.kept))]
        line += [", ".join(f"{count} {status}" for status, count in one.failed.items())] if failed else []
        table.add_row(*line)
    console.print(table)


def _said(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:,.2f}"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value
