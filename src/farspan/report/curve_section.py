"""What a report shows of forgetting curves besides their quality: memory lengths, curves, maps, and paired tests."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from farspan import stats
from farspan.record import Row
from farspan.report.contrasts import TextTest, group_differences, said, text_tests
from farspan.report.curve_figures import curve_figure, index_figure, known, map_figure, recall_figure
from farspan.report.curves import HEADLINE, Measured, Series, as_data, in_characters, measured, named, remarks, spoken
from farspan.report.export import WHOSE, CsvTable, p_value, statuses, whose
from farspan.report.interactive import place
from farspan.report.picture import draw_figure, draw_map
from farspan.report.runs import Group, short_names
from farspan.stats import Difference
from farspan.terminal import Terminal

COLUMNS = ("fine", "coarse", "half_life", "reach", "span")
PAPER_COLUMNS = ("paper_fine", "paper_coarse")
PROTOCOLS = {
    "nested": "a text is read and then predicted again whole, its last half scored; one text serves all lengths",
    "paper": "a text is read and then predicted again whole, its last half scored; a new text at each length, "
    "as in Liu et al. 2024",
    "probe": "after a text is read, a slice of it is predicted again: warm-up tokens + scored tokens",
}
CURVE_COLUMNS = (
    *WHOSE, "length", "depth", "n", "scored", "context", "distance", "copy", "copy_low", "copy_high",
    "control", "control_low", "control_high", "memory_index", "status",
)  # fmt: skip
LENGTH_COLUMNS = (
    *WHOSE, "trained_length", "repeats", "measure", "tokens", "low", "high", "censored", "interval_censored",
    "reason", "characters",
)  # fmt: skip


# in a terminal


class CurveResults:
    """Forgetting curves of one run, for a terminal and its folder."""

    def __init__(self, groups: Sequence[Group], folder: Path, *, test: bool = False) -> None:
        self.folder, self.groups = folder, [measured(group) for group in groups]
        self.curves = named([one.series for group in self.groups for one in group])
        self.drawn = [one for one in self.curves if one.summary is not None]
        self.tests = self._tests() if test and self.drawn else []
        several = len(self.drawn) > 1 and not test
        self.differences = [one for group in self.groups for one in group_differences(group)] if several else []

    @property
    def at_one_length(self) -> bool:
        """Whether only recall by distance can be shown."""
        return bool(self.drawn) and all(one.map is not None and len(one.curve.lengths) == 1 for one in self.drawn)

    def _tests(self) -> list[Any]:
        found = text_tests([one for group in self.groups for one in group])
        if not found:
            raise ValueError(f"{self.folder} has too few repeats to test its texts: measure at least 3 at a length")
        return found

    def print(self, console: Terminal) -> None:
        lines: list[str] = []
        if self.at_one_length:
            print_recall(self.drawn, console)
        elif self.drawn:
            print_memory_lengths(self.drawn, console)
            lines += [line for one in self.drawn for line in remarks(one)]
        for test in self.tests:
            lines += [f"{test.model} {test.method}, {test.which}: {line}" for line in said(test.result)]
        for one in self.differences:
            lines += said([one]) if any(one.values) else []  # a length that is 0 in both shows nothing
        for line in lines:
            console.print_line(line, style="dim")

    def draw(self) -> list[Path]:
        """Draw map.png for several lengths and depths, recall.png for one length, else curve.png, each also as SVG."""
        if not self.drawn:
            return []
        what = "; ".join(sorted({one.what for one in self.drawn}))
        names = ", ".join(sorted(short_names(one.model for one in self.drawn).values()))
        title, paths = f"Recall of {names} ({what})", []
        maps = [one for one in self.drawn if one.map is not None and len(one.map.lengths) > 1]
        for number, one in enumerate(maps, 1):
            own = f"{title}\n{one.name}" if len(maps) > 1 else title
            paths += draw_map(one, self.folder, own, "map" if len(maps) == 1 else f"map-{number}")
        if any(one.map is not None and len(one.map.lengths) == 1 for one in self.drawn):
            found = [one for group in self.groups for one in group if one.series.summary is not None]
            paths += draw_figure(recall_figure(found, title), self.folder, "recall")
        if not self.at_one_length:
            paths += draw_curves(self.drawn, self.folder, f"Forgetting curve of {names} ({what})")
        return paths

    def as_data(self) -> dict[str, Any]:
        return {
            "curves": as_data(self.curves),
            "tests": [
                {"model": one.model, "method": one.method, "texts": one.which} | one.result.as_dict()
                for one in self.tests
            ],
            "differences": [one.as_dict() for one in self.differences],
        }


def draw_curves(series: Sequence[Series], folder: str | Path, title: str, name: str = "curve") -> list[Path]:
    """Draw curves into NAME.png and NAME.svg; returns the two paths."""
    return draw_figure(curve_figure(series, title), folder, name)


def print_memory_lengths(series: Sequence[Series], console: Terminal) -> None:
    """Print the memory lengths of some curves, a column each, in tokens with their 95 % intervals, and what they
    mean."""
    what = {one.what for one in series}
    about = f", {min(what)}" if len(what) == 1 else ""
    table = Table(
        title=f"memory lengths{about} (tokens to be copied, 95 % interval over repeats)", title_justify="left"
    )
    table.add_column("")
    for one in series:
        table.add_column(one.name, justify="right", overflow="fold")
    for field in HEADLINE:
        table.add_row(spoken(field), *(str(getattr(one.summary, field)) for one in series))
    console.print(table)
    meanings = "; ".join(f"{spoken(field)}: {meaning}" for field, meaning in HEADLINE.items())
    console.print(meanings, style="dim", highlight=False)


def print_recall(series: Sequence[Series], console: Terminal) -> None:
    """Print recall by distance of some maps with one length each: copy, control and memory index at each distance."""
    for one in series:
        assert one.map is not None
        table = Table(title=f"recall by distance: {one.name}, {one.map.lengths[0]:,} tokens")
        for column in ("depth", "distance (tokens)", "copy", "control", "memory index"):
            table.add_column(column, justify="right")
        values = [half[:, 0] for half in (one.map.copy, one.map.control)]
        halves = [(stats.measured_mean(half), *stats.bands(half)) for half in values]
        for i, depth in enumerate(one.map.depths):
            cells = [f"{mean[i]:.3f} [{low[i]:.3f}, {high[i]:.3f}]" for mean, low, high in halves]
            distance, index = one.map.distance[0, i], one.map.memory_index[0, i]
            table.add_row(f"{depth:.0%}", f"{distance:,.0f}", *cells, f"{index:.3f}")
        console.print(table)


# on the page


def section(group: Group, number: int) -> dict[str, Any]:
    """Return what the page shows of a group of curves besides the table of its quality."""
    found = measured(group)
    series = [one.series for one in found]
    with_numbers = [one for one in series if one.summary is not None]
    several = any(len(one.curve.lengths) > 1 for one in series)
    figures: list[dict[str, Any]] = []
    if found and (several or not any(one.map for one in series)):
        # all of them, so that a curve has the colour of its line in the table
        key = "Solid: copy accuracy. Dashed: control, the same text guessed. Diamond: half-life. Cross: failed."
        figures.append(place(f"curve-{number}", "Curve", key, curve_figure(series)))
        if with_numbers:
            key = "1: repeats all that it could not have guessed. 0: remembers nothing."
            figures.append(place(f"index-{number}", "Memory index", key, index_figure(series)))
    if any(one.map is not None and len(one.map.lengths) == 1 for one in series):
        key = "Solid: copy accuracy. Dashed: control. Dotted: memory index."
        figures.append(place(f"recall-{number}", "Recall by distance", key, recall_figure(found)))
    for index, one in enumerate(found):
        if one.series.map is not None and len(one.series.map.lengths) > 1:
            about = {
                "id": f"map-{number}-{index}",
                "heading": f"Memory map: {one.series.name}",
                "key": "",
                "kind": "map",
            }
            figures.append(about | map_figure(one))
    protocol = group.title.partition(",")[0].partition(" ")[0]
    names = (*COLUMNS, *PAPER_COLUMNS) if protocol == "paper" else COLUMNS
    return {
        "kind": "curve",
        "about": PROTOCOLS.get(protocol, ""),
        "columns": names,
        "lines": [_line(one, names) for one in series],
        "remarks": [line for one in with_numbers for line in remarks(one)],
        "figures": figures,
        "draws_quality": bool(found),
        "recall": [] if several else [line for one in found for line in _recall(one)],
        "differences": [_difference(one) for one in group_differences(found)],
    }


def _line(one: Series, names: Sequence[str]) -> dict[str, Any]:
    """Return a line of the table of memory lengths."""
    whose = {"model": one.model, "method": one.method, "name": one.name, "trained": one.trained_length}
    line: dict[str, Any] = whose | {"cells": None, "failed": ", ".join(sorted(set(one.curve.failures.values())))}
    if one.summary is not None:
        half = in_characters(one.summary.half_life, one)
        cells = {name: _cell(getattr(one.summary, name)) for name in names}
        if half is not None and half.value:
            cells["half_life"]["more"] = [f"{_cell(half)['value']} characters"]
        line |= {"cells": list(cells.values()), "repeats": one.summary.repeats}
    return line


def _cell(length: stats.MemoryLength) -> dict[str, Any]:
    value, _, interval = str(length).partition(" ")
    why = length.reason
    if length.censored:
        why = f"more than was measured; what ended the measurement: {length.reason}"
    return {"value": value, "interval": interval, "why": why, "more": []}


def _recall(one: Measured) -> Iterator[dict[str, Any]]:
    """Yield the lines of a table of recall by distance, of a map at one length; none where there is no map."""
    if one.series.map is None:
        return
    for depth, distance in zip(one.series.map.depths.tolist(), one.series.map.distance[0], strict=True):
        at = one.at_depth(depth)
        line: dict[str, Any] = {"name": one.series.name, "depth": f"{depth:g}", "cells": []}
        if at.measured.any():
            line["distance"] = f"{distance:,.0f}"
            for values in (at.copy, at.control):
                (low,), (high,) = stats.bands(values)
                value, _, interval = known(stats.measured_mean(values)[0], low, high).partition(" ")
                line["cells"].append({"value": value, "interval": interval, "why": "", "more": []})
            index = f"{stats.memory_index(at)[0]:.3f}"
            line["cells"].append({"value": index, "interval": "", "why": "", "more": []})
        else:
            line["distance"] = ", ".join(at.failures.values())
        yield line


def _difference(one: Difference) -> dict[str, str]:
    low, high = (f"{end:+,.0f}" if end is not None else sign for end, sign in ((one.low, "-∞"), (one.high, "∞")))
    return {
        "first": one.curves[0],
        "second": one.curves[1],
        "name": one.name.replace("_", "-"),
        "value": f"{one.value:+,.0f} {'' if one.unit == 'tokens' else one.unit}".strip(),
        "interval": f"[{low}, {high}]",
        "p": p_value(one.p),
        "pairs": f"{one.pairs:,}" if one.pairs else "unpaired",
    }


def summary(groups: Sequence[Group]) -> dict[str, Any]:
    """Return what the page shows of all groups together."""
    found = [one for group in groups for one in measured(group)]
    return {"meanings": HEADLINE, "text_tests": [_text_test(one) for one in text_tests(found)]}


def _text_test(one: TextTest) -> dict[str, Any]:
    """Return a table over lengths, its numbers in points of accuracy."""
    lines = []
    for at in one.result.lengths:
        ends = [f"{100 * end:+.1f}" for end in (at.low, at.high) if end is not None]
        lines.append(
            {
                "length": f"{at.length:,}",
                "means": [f"{100 * at.means[source]:.1f}" for source in one.result.sources],
                "value": at.reason if at.difference is None else f"{100 * at.difference:+.1f}",
                "interval": f"[{', '.join(ends)}]" if ends else "",
                "p": [p_value(p) for p in (at.paired_holm, at.tost_holm, at.anova_holm, at.kruskal_holm)],
                "verdict": at.verdict,
            }
        )
    return {"about": one, "summary": said(one.result), "lines": lines}


# as CSV


def csv_tables(groups: Sequence[Group]) -> dict[str, CsvTable]:
    """Return curves.csv, a line per run, model, method, protocol and texts, length and depth, and memory_lengths.csv, a
    line per curve and memory length, in tokens of context unless the column says characters."""
    found = [one for group in groups for one in measured(group)]
    return {
        "curves.csv": CsvTable(CURVE_COLUMNS, [line for one in found for line in _points(one)]),
        "memory_lengths.csv": CsvTable(LENGTH_COLUMNS, [line for one in found for line in _lengths(one)]),
    }


def _points(one: Measured) -> Iterator[dict[str, Any]]:
    where = stats.memory_map(one.member.rows)
    cells: dict[tuple[int, float], list[Row]] = {}
    for row in one.member.rows:
        cells.setdefault((row.length, row.depth), []).append(row)
    for column, depth in enumerate(where.depths.tolist()):
        curve = one.at_depth(depth)
        halves = {
            name: (stats.measured_mean(values), *stats.bands(values))
            for name, values in (("copy", curve.copy), ("control", curve.control))
        }
        index = stats.memory_index(curve)
        for i, length in enumerate(curve.lengths.tolist()):
            line = whose(one.member, one.series.what) | {"length": length, "depth": depth}
            line |= {
                "n": int(np.isfinite(curve.copy[:, i]).sum()),
                "status": statuses(cells.get((length, depth), [])),
            }
            if curve.measured[i]:
                distance = where.distance[where.lengths.tolist().index(length), column]
                line |= {"scored": int(curve.scored[i]), "context": int(curve.context[i])}
                line |= {"distance": float(distance), "memory_index": float(index[i])}
                for name, half in halves.items():
                    ends = zip((name, f"{name}_low", f"{name}_high"), half, strict=True)
                    line |= {key: float(values[i]) for key, values in ends}
            yield line


def _lengths(one: Measured) -> Iterable[dict[str, Any]]:
    if one.series.summary is None:
        return
    for measure in (*COLUMNS, *PAPER_COLUMNS):
        length: stats.MemoryLength = getattr(one.series.summary, measure)
        characters = in_characters(length, one.series)
        yield whose(one.member, one.series.what) | {
            "trained_length": one.series.trained_length,
            "repeats": one.series.summary.repeats,
            "measure": measure,
            "tokens": float(length.value),
            "low": None if length.low is None else float(length.low),
            "high": None if length.high is None else float(length.high),
            "censored": length.censored,
            "interval_censored": length.interval_censored,
            "reason": length.reason,
            "characters": None if characters is None else float(characters.value),
        }
