"""Perplexity by length: the numbers of rows with intervals over repeats, as tables, JSON and a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure  # not pyplot, which would choose the backend of the whole program
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from farspan.record import Row, latest
from farspan.report.picture import COLOURS, MARKERS, add_legend, saved
from farspan.report.tables import Source, short_names, told_apart
from farspan.stats import interval, measured_mean, perplexity_label


@dataclass(frozen=True)
class Series:
    """What one model under one method was measured to expect, by length."""

    name: str  # tells it from the others it stands beside
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
    """Perplexity by length of each model, method and setting among the rows, in the order they come."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in latest(rows):
        if row.task == "perplexity":
            groups.setdefault((row.model, row.method, perplexity_label(row.settings)), []).append(row)
    several = [len({key[part] for key in groups}) > 1 for part in range(3)]
    short = short_names(key[0] for key in groups)
    found = []
    for (model, method, what), group in groups.items():
        parts = [short[model]] if several[0] or not several[1] else []
        parts += [method] if several[1] or not several[0] else []
        parts += [what] if several[2] else []
        found.append(_series(" ".join(parts), model, method, what, group))
    return found


def _series(name: str, model: str, method: str, what: str, rows: Sequence[Row]) -> Series:
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
        name, model, method, what, np.array(lengths), nats, accuracy, failures, same, ends, positions[0], positions[1]
    )


@dataclass(frozen=True)
class Member:
    """One model under one method in one run, and the rows that say so."""

    source: Source
    series: Series  # its name tells it from the others of its group
    rows: list[Row]

    @property
    def trained_length(self) -> int | None:
        """Tokens of the whole context."""
        length = self.source.header["models"].get(self.series.model, {}).get("trained_length")
        return None if length is None else int(length)


@dataclass(frozen=True)
class Group:
    """Series whose numbers stand beside each other: the same targets, text and version of the task."""

    title: str
    targets: str  # fixed, last or all
    members: list[Member]


def grouped(sources: Sequence[Source]) -> list[Group]:
    """Perplexity by length in some runs, what was scored in the same way together, in the order it comes."""
    groups: dict[tuple[str, int], list[Member]] = {}
    for source in sources:
        rows = [row for row in source.rows if row.task == "perplexity"]
        for version in sorted({row.version for row in rows}, reverse=True):
            for one in series(row for row in rows if row.version == version):
                own = [row for row in rows if (row.model, row.method, row.version) == (one.model, one.method, version)]
                own = [row for row in own if perplexity_label(row.settings) == one.what]
                groups.setdefault((one.what, version), []).append(Member(source, one, own))
    found = []
    for (what, version), members in groups.items():
        title = f"perplexity, {what}"
        title += f" (task version {version})" if sum(what == other for other, _ in groups) > 1 else ""
        names = told_apart([(one.series.model, one.series.method, one.source.name) for one in members])
        named = [replace(one, series=replace(one.series, name=n)) for one, n in zip(members, names, strict=True)]
        found.append(Group(title, members[0].rows[0].settings["targets"], named))
    return found


def written(perplexity: float) -> str:
    """In three digits, or all those before the point."""
    return f"{perplexity:,.{2 if perplexity < 9.995 else 1 if perplexity < 99.95 else 0}f}"


def as_data(found: Sequence[Series]) -> list[dict[str, Any]]:
    """A summary by model, method and length, ready for JSON: intervals are null under two repeats."""
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


def print_perplexity(found: Sequence[Series], console: Console) -> None:
    """A table for each series: nats per token with their 95 % interval, perplexity and accuracy by length; and by
    position in the longest text, where all tokens were scored."""
    for one in found:
        title = f"{one.name}: {one.what} (95 % intervals)"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for column in ("length", "nats/token", "perplexity", "accuracy", *(["gain"] if one.same_targets else [])):
            table.add_column(column, justify="right")
        for at, length in enumerate(one.lengths):
            if not one.measured[at]:
                table.add_row(f"{length:,}", one.failures.get(int(length), "missing"))
                continue
            gain = [_said(one.gain[:, at])] if one.same_targets else []
            table.add_row(f"{length:,}", *_cells(one.nats[:, at], one.accuracy[:, at]), *gain)
        console.print(table)
        if one.ends:
            table = Table(title=f"by position in {one.ends[-1]:,} tokens", title_justify="left", box=SIMPLE_HEAD)
            for column in ("positions", "nats/token", "perplexity", "accuracy"):
                table.add_column(column, justify="right")
            for at, (begin, end) in enumerate(zip([0, *one.ends], one.ends, strict=False)):
                cells = _cells(one.position_nats[:, at], one.position_accuracy[:, at])
                table.add_row(f"{begin:,} to {end - 1:,}", *cells)
            console.print(table)
    if any(one.same_targets for one in found):
        line = "gain: nats per token less than the same tokens take at the shortest length"
        console.print(line, style="dim", highlight=False)


def draw_perplexity(
    found: Sequence[Series], folder: str | Path, title: str, trained: Iterable[int | None] = ()
) -> list[Path]:
    """Draws nats per token (left) and perplexity (right) against length into perplexity.png and .svg; returns the two
    paths. A line with its interval for each series, crosses below where every row of a length failed, and a dotted
    line at each trained length."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for number, one in enumerate(found):
        colour, good = COLOURS[number % len(COLOURS)], one.measured
        marker = MARKERS[number % len(MARKERS)]
        lengths, nats = one.lengths[good], one.nats[:, good]
        low, high = interval(nats)
        # side by side, as intervals on top of each other could not be told apart
        at = lengths * 2.0 ** (0.04 * (number - (len(found) - 1) / 2))
        mean = measured_mean(nats)
        spread = None if np.isnan(low).all() else [mean - low, high - mean]
        axes.errorbar(
            at, mean, yerr=spread, fmt=f"{marker}-", color=colour, markersize=5, linewidth=1.4, elinewidth=1, capsize=3,
            label=one.name,
        )  # fmt: skip
        if failed := [int(length) for length in one.lengths[~good]]:
            reasons = ", ".join(sorted({one.failures.get(length, "missing") for length in failed}))
            axes.plot(
                failed, [0.02] * len(failed), "x", color=colour, transform=axes.get_xaxis_transform(), clip_on=False,
                label=f"{one.name}: failed, {reasons}",
            )  # fmt: skip
    for length in sorted({length for length in trained if length}):
        axes.axvline(length, color="#777777", linestyle=":", linewidth=1.2)
        axes.annotate(
            f"{length:,} (trained)", (length, 0.98), xycoords=axes.get_xaxis_transform(), xytext=(-3, 0),
            textcoords="offset points", rotation=90, va="top", ha="right", fontsize=8, color="#555555",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = sorted({int(length) for one in found for length in one.lengths})
    if len(ticks) <= 12:
        axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="length (tokens)", ylabel="nats per token", title=title)
    right = axes.secondary_yaxis("right", functions=(lambda y: y, lambda y: y))  # the same height, said otherwise
    right.yaxis.set_major_locator(MaxNLocator(8))
    right.yaxis.set_major_formatter(FuncFormatter(lambda nats, _: written(float(np.exp(nats)))))
    right.set_ylabel("perplexity")
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    return saved(figure, Path(folder), "perplexity")


def numbers(name: str, values: np.ndarray) -> dict[str, float | None]:
    """Mean and interval of some repeats, rounded; None where there is none."""
    low, high = interval(values)
    numbers = {name: measured_mean(values), f"{name}_low": low, f"{name}_high": high}
    return {key: round(float(value), 6) if np.isfinite(value) else None for key, value in numbers.items()}


def _cells(nats: np.ndarray, accuracy: np.ndarray) -> tuple[str, str, str]:
    """Nats with their interval, perplexity and accuracy of some repeats."""
    return _said(nats), f"{np.exp(measured_mean(nats)):,.2f}", f"{measured_mean(accuracy):.3f}"


def _said(values: np.ndarray) -> str:
    low, high = interval(values)
    mean = f"{measured_mean(values):.3f}"
    return mean if np.isnan(low) else f"{mean} [{low:.3f}, {high:.3f}]"
