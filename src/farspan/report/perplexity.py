"""What a report shows of perplexity besides its value by length: gain over the shortest length, and by position."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from farspan.record import Row
from farspan.report.cells import cells_of
from farspan.report.export import WHOSE, CsvTable, statuses, whose
from farspan.report.figure import Figure, Line
from farspan.report.figures import quality_figure
from farspan.report.interactive import place
from farspan.report.picture import draw_figure, three_digits
from farspan.report.runs import Group, Member, Source, grouped, names_of, short_names
from farspan.stats import bands, interval, measured_mean
from farspan.terminal import Terminal

TARGETS = {
    "fixed": "the same tokens are scored at every length, and longer lengths put more context before them",
    "last": "the last tokens of each length are scored; the context begins at the beginning of the text",
    "all": "every token of a length is scored in one pass, so most of them have a shorter context",
}
NATS_COLUMNS = ("n", "nats", "nats_low", "nats_high")
ACCURACY_COLUMNS = ("accuracy", "accuracy_low", "accuracy_high")
PERPLEXITY_COLUMNS = (
    *WHOSE, "length", *NATS_COLUMNS, "perplexity", *ACCURACY_COLUMNS, "gain", "gain_low", "gain_high", "status",
)  # fmt: skip
POSITION_COLUMNS = (*WHOSE, "length", "begin", "end", *NATS_COLUMNS, *ACCURACY_COLUMNS)


@dataclass(frozen=True)
class Series:
    """Perplexity of one model under one method, by length."""

    name: str  # distinguishes it from the others of its table
    model: str
    method: str
    what: str  # targets and text; numbers are comparable under one only
    lengths: np.ndarray  # [lengths], ascending
    nats: np.ndarray  # [repeats, lengths], per token; NaN where a row failed
    accuracy: np.ndarray  # [repeats, lengths]
    failures: dict[int, str]  # length -> status of the rows that failed there
    same_targets: bool  # at all lengths, so that lengths can be compared pair by pair
    ends: list[int]  # where the buckets of positions of the longest length measured end; empty: only `all` has them
    position_nats: np.ndarray  # [repeats, buckets], per token
    position_accuracy: np.ndarray  # [repeats, buckets]

    @property
    def measured(self) -> np.ndarray:
        """Which lengths have at least one good row."""
        return np.isfinite(self.nats).any(0)

    @property
    def gain(self) -> np.ndarray:
        """[repeats, lengths]: nats per token less than the same targets take at the shortest length measured."""
        return self.nats[:, [int(self.measured.argmax())]] - self.nats


def series(rows: Iterable[Row]) -> list[Series]:
    """Return the perplexities among the rows, by length, with names that distinguish them."""
    source = Source.of("", "", {"settings": {}, "models": {}}, rows)
    return measured([group for group in grouped([source]) if group.task == "perplexity"])


def measured(groups: Sequence[Group]) -> list[Series]:
    """Return the members of some groups, with names for one table."""
    members = [(group.title, one) for group in groups for one in group.members if one.rows]
    names = names_of([(one.model, one.method, title) for title, one in members])
    return [_series(name, title, one) for name, (title, one) in zip(names, members, strict=True)]


def _series(name: str, what: str, member: Member) -> Series:
    rows = member.rows
    lengths, repeats = (sorted({getattr(row, field) for row in rows}) for field in ("length", "repeat"))
    nats, accuracy = (np.full((len(repeats), len(lengths)), np.nan) for _ in range(2))
    good = [row for row in rows if row.status == "ok"]
    for row in good:
        cell = repeats.index(row.repeat), lengths.index(row.length)
        nats[cell], accuracy[cell] = row.scores["nats"], row.scores["accuracy"]
    longest = [row for row in good if row.length == max(r.length for r in good) and "buckets" in row.scores]
    ends: list[int] = longest[0].scores["buckets"]["ends"] if longest else []
    sizes = np.diff([0, *ends])
    positions = [
        np.array([row.scores["buckets"][field] for row in longest], float).reshape(len(longest), len(ends)) / sizes
        for field in ("nats", "hits")
    ]
    failures = {row.length: row.status for row in rows if row.status != "ok"}
    same = rows[0].settings["targets"] == "fixed"
    return Series(
        name, member.model, member.method, what, np.array(lengths), nats, accuracy, failures, same, ends, *positions
    )


def numbers(name: str, values: np.ndarray) -> dict[str, float | None]:
    """Return mean and interval of some repeats, rounded; None where there is none."""
    low, high = interval(values)
    numbers = {name: measured_mean(values), f"{name}_low": low, f"{name}_high": high}
    return {key: round(float(value), 6) if np.isfinite(value) else None for key, value in numbers.items()}


def as_data(found: Sequence[Series]) -> list[dict[str, Any]]:
    """Return a summary by model, method and length, ready for JSON: intervals are null under two repeats."""
    return [
        {
            "model": one.model,
            "method": one.method,
            "task": "perplexity",
            "what": one.what,
            "failed": {str(length): status for length, status in one.failures.items()},
            "lengths": [
                {"length": int(one.lengths[at]), "repeats": int(np.isfinite(one.nats[:, at]).sum())}
                | numbers("nats", one.nats[:, at])
                | {"perplexity": round(float(np.exp(measured_mean(one.nats)[at])), 4)}
                | numbers("accuracy", one.accuracy[:, at])
                | (numbers("gain", one.gain[:, at]) if one.same_targets else {})
                for at in np.flatnonzero(one.measured)
            ],
            "positions": [
                {"begin": begin, "end": end}
                | numbers("nats", one.position_nats[:, at])
                | numbers("accuracy", one.position_accuracy[:, at])
                for at, (begin, end) in enumerate(zip([0, *one.ends], one.ends, strict=False))
            ],
        }
        for one in found
    ]


class PerplexityResults:
    """Perplexity of one run, for a terminal and its folder."""

    def __init__(self, groups: Sequence[Group], folder: Path) -> None:
        self.groups, self.folder, self.found = groups, folder, measured(groups)

    def print(self, console: Terminal) -> None:
        """Print a table for each member: nats per token with their 95 % interval, perplexity and accuracy by length;
        and by position in the longest text, where all tokens were scored."""
        drawn = [one for one in self.found if one.measured.any()]
        for one in drawn:
            table = _table(f"{one.name}: {one.what} (95 % intervals)", "length", *(["gain"] * one.same_targets))
            for at, length in enumerate(one.lengths):
                if not one.measured[at]:
                    table.add_row(f"{length:,}", one.failures.get(int(length), "missing"))
                    continue
                gain = [_mean(one.gain[:, at])] if one.same_targets else []
                table.add_row(f"{length:,}", *_cells(one.nats[:, at], one.accuracy[:, at]), *gain)
            console.print(table)
            if one.ends:
                table = _table(f"by position in {one.ends[-1]:,} tokens", "positions")
                for at, (begin, end) in enumerate(zip([0, *one.ends], one.ends, strict=False)):
                    cells = _cells(one.position_nats[:, at], one.position_accuracy[:, at])
                    table.add_row(f"{begin:,} to {end - 1:,}", *cells)
                console.print(table)
        if any(one.same_targets for one in drawn):
            line = "gain: nats per token less than the same tokens take at the shortest length"
            console.print(line, style="dim", highlight=False)

    def draw(self) -> list[Path]:
        """Draw perplexity.png, of further groups perplexity-2.png and so on, each also as SVG."""
        paths = []
        for number, group in enumerate(self.groups, 1):
            drawn = [one for one in group.members if any(row.status == "ok" for row in one.rows)]
            if not drawn:
                continue
            names = ", ".join(sorted(short_names(one.model for one in drawn).values()))
            trained = [one.trained_length for one in drawn if one.trained_length]
            figure = quality_figure(cells_of(group), f"Perplexity of {names} ({group.title})", trained)
            paths += draw_figure(figure, self.folder, "perplexity" if number == 1 else f"perplexity-{number}")
        return paths

    def as_data(self) -> dict[str, Any]:
        return {"perplexity": as_data(self.found)}


def _table(title: str, first: str, *more: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in (first, "nats/token", "perplexity", "accuracy", *more):
        table.add_column(column, justify="right")
    return table


def _cells(nats: np.ndarray, accuracy: np.ndarray) -> tuple[str, str, str]:
    """Return nats with their interval, perplexity and accuracy of some repeats."""
    return _mean(nats), f"{np.exp(measured_mean(nats)):,.2f}", f"{measured_mean(accuracy):.3f}"


def _mean(values: np.ndarray) -> str:
    low, high = interval(values)
    mean = f"{measured_mean(values):.3f}"
    return mean if np.isnan(low) else f"{mean} [{low:.3f}, {high:.3f}]"


# on the page


def section(group: Group, number: int) -> dict[str, Any]:
    """Return what the page shows of a group besides its quality by length."""
    found = [
        (index, _series(one.name, group.title, one)) for index, one in enumerate(group.members) if one.rows
    ]  # with the names and colours of the group
    drawn = [(index, one) for index, one in found if one.measured.any()]
    figures = []
    if drawn:
        key = "Share of tokens to which the model gives the highest probability."
        figures.append(place(f"accuracy-{number}", "Accuracy", key, _by_length(drawn, "accuracy")))
    if any(one.same_targets for _, one in drawn):
        key = "Nats per token less than the same tokens take at the shortest length, window by window."
        figures.append(place(f"gain-{number}", "Gain", key, _by_length(drawn, "gain")))
    if any(one.ends for _, one in drawn):
        key = "Nats per token by position in the longest text."
        figures.append(place(f"position-{number}", "By position", key, _by_position(drawn)))
    targets = next(row.settings["targets"] for one in group.members for row in one.rows)
    return {"kind": "perplexity", "about": TARGETS.get(targets, ""), "figures": figures}


def _by_length(found: Sequence[tuple[int, Series]], what: str) -> Figure:
    """Return accuracy, or gain, over length."""
    lines = []
    for index, one in found:
        lengths, values = one.lengths[one.measured], getattr(one, what)[:, one.measured]
        low, high = bands(values) if what == "accuracy" else interval(values)
        mean = measured_mean(values)
        texts = [[one.name, f"length {length:,}", f"{what} {_mean(values[:, i])}"] for i, length in enumerate(lengths)]
        lines.append(Line(one.name, lengths, mean, index, low, high, texts, what))
    ticks = sorted({int(length) for _, one in found for length in one.lengths})
    y = "accuracy" if what == "accuracy" else "gain (nats per token)"
    return Figure("", "length (tokens)", y, lines, log_x=True, ticks=ticks, num_members=len(found))


def _by_position(found: Sequence[tuple[int, Series]]) -> Figure:
    """Return nats per token over the position in the longest text, of those that scored every token."""
    lines = []
    for index, one in found:
        if not one.ends:
            continue
        low, high = interval(one.position_nats)
        mean, accuracy = measured_mean(one.position_nats), measured_mean(one.position_accuracy)
        texts = [
            [
                one.name,
                f"positions {begin:,} to {end - 1:,} of {one.ends[-1]:,}",
                f"nats per token {_mean(one.position_nats[:, i])}",
                f"perplexity {three_digits(float(np.exp(mean[i])))}",
                f"accuracy {accuracy[i]:.3f}",
            ]
            for i, (begin, end) in enumerate(zip([0, *one.ends], one.ends, strict=False))
        ]
        lines.append(Line(one.name, one.ends, mean, index, low, high, texts, "position"))
    ticks = sorted({end for _, one in found for end in one.ends})
    return Figure(
        "", "position in the text (tokens)", "nats per token", lines, log_x=True, ticks=ticks, num_members=len(found)
    )


# as CSV


def csv_tables(groups: Sequence[Group]) -> dict[str, CsvTable]:
    """Return perplexity.csv, a line per run, model, method, targets and text, and length; and positions.csv, a line per
    range of positions in the longest text, of those that scored every token."""
    found = [(one, _series(one.name, group.title, one)) for group in groups for one in group.members if one.rows]
    tables = {"perplexity.csv": CsvTable(PERPLEXITY_COLUMNS, [line for one in found for line in _lengths(*one)])}
    if positions := [line for one in found for line in _positions(*one)]:
        tables["positions.csv"] = CsvTable(POSITION_COLUMNS, positions)
    return tables


def _lengths(member: Member, one: Series) -> Iterator[dict[str, Any]]:
    (found,) = as_data([one])
    measured = {at["length"]: at for at in found["lengths"]}
    for length in one.lengths.tolist():
        numbers = dict(measured.get(length, {"length": length, "repeats": 0}))
        status = statuses(row for row in member.rows if row.length == length)
        yield whose(member, one.what) | {"n": numbers.pop("repeats"), "status": status} | numbers


def _positions(member: Member, one: Series) -> Iterator[dict[str, Any]]:
    (found,) = as_data([one])
    about = whose(member, one.what) | {"length": max(one.ends, default=0), "n": len(one.position_nats)}
    return (about | part for part in found["positions"])
