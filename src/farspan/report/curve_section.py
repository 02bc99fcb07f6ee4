"""The report of forgetting curves: memory lengths, curves, maps, and paired tests."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from farspan import stats
from farspan.record import by_key
from farspan.report.contrasts import (
    TextTest,
    difference_line,
    group_differences,
    longest_memory,
    p_of_difference,
    robustness_lines,
    text_tests,
)
from farspan.report.curve_figures import curve_figure, index_figure, map_figure, recall_figure, why_missing
from farspan.report.curves import (
    HEADLINE,
    CurveMember,
    Point,
    as_data,
    curves_of,
    remarks,
    spoken,
    trained_length_filled,
    verdict,
)
from farspan.report.export import WHOSE, CsvTable, number, p_value, ranged, whose
from farspan.report.figure import Figure, Heat, sample_size
from farspan.report.figures import depth_names
from farspan.report.interactive import on_page
from farspan.report.picture import draw_figure
from farspan.report.runs import Group, renamed, short_names
from farspan.report.task_report import TaskReport
from farspan.stats import Difference
from farspan.terminal import Terminal

RECALL = ("depth", "distance", "memory index", "copy", "control")
LEADING = ("half_life", "reach", "span")
COLUMNS = (*LEADING, "fine", "coarse")
PAPER_COLUMNS = ("paper_fine", "paper_coarse")
PROTOCOLS = {
    "nested": "a text is read and then predicted again whole, its last half scored; one text serves all lengths",
    "paper": "a text is read and then predicted again whole, its last half scored; a new text at each length, "
    "as in Liu et al. 2024",
    "probe": "after a text is read, a slice of it is predicted again: warm-up tokens + scored tokens",
}
DIFFERENCES = (
    "From the first curve, in tokens, with 95 % intervals, paired by the texts that both were measured on; models with "
    "different tokenizers are compared in characters, unpaired. p is without correction for several tests. If curves "
    "were measured at different lengths, the interval also covers the difference at the common lengths, and p is the "
    "larger of the two."
)
CURVE_COLUMNS = (
    *WHOSE, "length", "depth", "n", "scored", "context", "distance", "copy", "copy_low", "copy_high",
    "control", "control_low", "control_high", "memory_index", "memory_index_low", "memory_index_high", "status",
)  # fmt: skip
LENGTH_COLUMNS = (
    *WHOSE, "trained_length", "repeats", "measure", "tokens", "low", "high", "censored", "interval_censored",
    "below", "reason", "characters",
)  # fmt: skip


class CurveReport(TaskReport):
    """Forgetting curves: memory lengths, recall by distance, maps, and tests of texts and differences.

    Args:
        test: test whether several texts give the same curve.
        paper: also print the memory lengths of the Forgetting Curve's paper.
    """

    name, member = "forgetting curve", CurveMember

    def __init__(self, groups: Sequence[Group], folder: Path, *, test: bool = False, paper: bool = False) -> None:
        super().__init__(groups, folder)
        self.test, self.paper = test, paper
        if test and self.drawn and not self.tests:
            raise ValueError(f"{folder} has too few repeats to test its texts: measure at least 3 at a length")

    @cached_property
    def members(self) -> list[CurveMember]:
        """All curves, with names that distinguish them within their group."""
        return [one for group in self.groups for one in curves_of(group.members)]

    @cached_property
    def curves(self) -> list[CurveMember]:
        """All curves, with names for one table."""
        return curves_of(renamed(self.groups, CurveMember))

    @cached_property
    def drawn(self) -> list[CurveMember]:
        """The curves that have a result, with names for one table."""
        return [one for one in self.curves if one.summary is not None]

    @cached_property
    def tests(self) -> list[TextTest]:
        return text_tests(self.members) if self.test and self.drawn else []

    @cached_property
    def differences(self) -> list[Difference]:
        groups = by_key((one.what, one) for one in self.drawn if not self.test).values()
        return [one for group in groups for one in group_differences(group)]

    def name_of(self, group: Group) -> str:
        return "recall by distance" if _is_recall(curves_of(group.members)) else self.name

    def print(self, console: Terminal) -> None:
        for one in self.drawn:
            if one.is_recall:
                title = f"recall by distance: {one.name}, {_about_recall([one])}"
                console.print_table(title, RECALL, _recall(one), num_keys=2)
        lines = _filled(self.drawn)
        if forgetting := _forgetting(self.drawn):
            print_curves(forgetting, console, paper=self.paper)
            lines += [line for one in forgetting for line in remarks(one, HEADLINE if self.paper else LEADING)]
        for test in self.tests:
            verdict, *numbers = robustness_lines(test.result)
            lines += [f"{test.model} {test.method}, {test.which}: {verdict}", *numbers]
        # a length that is 0 in both shows nothing
        lines += [difference_line(one) for one in self.differences if any(one.values)]
        for line in lines:
            console.print_line(line, style="dim")

    def draw(self) -> list[Path]:
        """Draw map.png for several lengths and depths, recall.png for one length, else curve.png, each also as SVG."""
        if not self.drawn:
            return []
        title, paths = _title("Recall", self.drawn), []
        maps = [one for one in self.drawn if one.map is not None and len(one.map.lengths) > 1]
        for place, one in enumerate(maps, 1):
            figure = map_figure(one, f"{title}\n{one.name}" if len(maps) > 1 else title)
            paths += draw_figure(figure, self.folder, "map" if len(maps) == 1 else f"map-{place}")
        if any(one.is_recall for one in self.drawn):
            by_distance = recall_figure(self.drawn, _title("Recall by distance", self.drawn))
            paths += draw_figure(by_distance, self.folder, "recall")
        if forgetting := _forgetting(self.drawn):
            paths += draw_curves(forgetting, self.folder, _title("Forgetting curve", forgetting))
        return paths

    def figure(self, group: Group) -> Figure | Heat | None:
        """Return a map for one curve with several lengths and depths, recall by distance for one length, else the
        curves."""
        curves = [one for one in curves_of(group.members) if one.summary is not None]
        if not curves:
            return None
        if len(curves) == 1 and (found := curves[0].map) is not None and len(found.lengths) > 1:
            return map_figure(curves[0], _title("Recall", curves))
        if forgetting := _forgetting(curves):
            return curve_figure(forgetting, _title("Forgetting curve", forgetting))
        return recall_figure(curves, _title("Recall by distance", curves))

    def as_data(self) -> dict[str, Any]:
        tests = [
            {"model": one.model, "method": one.method, "texts": one.which} | asdict(one.result) for one in self.tests
        ]
        return {
            "curves": as_data(self.curves),
            "tests": tests,
            "differences": [asdict(one) for one in self.differences],
        }

    def section(self, group: Group, number: int) -> dict[str, Any]:
        curves = curves_of(group.members)
        indices = [index for index, one in enumerate(group.members) if curves_of([one])]  # their colours
        figures = []
        forgetting = _forgetting(curves)
        own = [index for index, one in zip(indices, curves, strict=True) if one in forgetting]  # of these
        if forgetting:
            key = "Solid: copy accuracy. Dashed: control, the same text guessed. Hollow: half-life. Cross: no result."
            figures.append(on_page(f"curve-{number}", "Curve", key, curve_figure(forgetting, indices=own)))
            if any(one.summary for one in forgetting):
                key = "1: repeats all that it could not have guessed. 0: remembers nothing."
                figures.append(on_page(f"index-{number}", "Memory index", key, index_figure(forgetting, own)))
        if any(one.is_recall for one in curves):
            key = "Solid: copy accuracy. Dashed: control. Dotted: memory index."
            figure = recall_figure(curves, indices=indices)
            figures.append(on_page(f"recall-{number}", "Recall by distance", key, figure))
        for index, one in enumerate(curves):
            if one.map is not None and len(one.map.lengths) > 1:
                figures.append(on_page(f"map-{number}-{index}", f"Memory map: {one.name}", "", map_figure(one)))
        protocol = group.title.partition(",")[0].partition(" ")[0]
        names = (*COLUMNS, *PAPER_COLUMNS) if protocol == "paper" else COLUMNS
        return {
            "kind": "curve",
            "about": "; ".join(filter(None, (PROTOCOLS.get(protocol), _which_depth(forgetting)))),
            "verdict": longest_memory(curves),
            "columns": list(map(spoken, names)),
            "lines": [_line(one, names) | {"index": index} for index, one in zip(own, forgetting, strict=True)],
            "remarks": [*_filled(curves), *(line for one in forgetting if one.summary for line in remarks(one))],
            "figures": figures,
            "draws_quality": bool(curves),
            "tables": _recall_tables(curves),
            "differences": [_difference(one) for one in group_differences(curves)],
            "about_differences": DIFFERENCES,
        }

    def summary(self) -> dict[str, Any]:
        meanings = {spoken(name): meaning for name, meaning in HEADLINE.items()}
        has_lengths = any(_forgetting(curves_of(group.members)) for group in self.groups)
        tests = [_text_test(one) for one in text_tests(self.members)]
        return {"meanings": meanings if has_lengths else {}, "text_tests": tests}

    def csv_tables(self) -> dict[str, CsvTable]:
        """Return curves.csv, a line per run, model, method, protocol and texts, length and depth, and, of forgetting
        curves with a result, memory_lengths.csv, a line per curve and memory length, in tokens of context except in the
        column `characters`."""
        points = [
            whose(one) | point
            for one in self.members
            for depth in one.everywhere.depths.tolist()
            for point in one.points(depth)
        ]
        lengths = [line for one in _forgetting(self.members) for line in _lengths(one)]
        tables = {"curves.csv": CsvTable(CURVE_COLUMNS, points)}
        return tables | ({"memory_lengths.csv": CsvTable(LENGTH_COLUMNS, lengths)} if lengths else {})


def _title(shown: str, curves: Sequence[CurveMember]) -> str:
    names = ", ".join(sorted(short_names(one.model for one in curves).values()))
    return f"{shown} of {names} ({'; '.join(sorted({one.what for one in curves}))})"


def _which_depth(curves: Sequence[CurveMember]) -> str:
    """Return which depth curves and memory lengths are of; "" if no other was measured."""
    several = any(one.map for one in curves)
    return "curves and memory lengths are those of the beginning of the texts (depth 0)" if several else ""


def _forgetting(curves: Sequence[CurveMember]) -> list[CurveMember]:
    """Return the curves of one group, or table, that have memory lengths: not those of recall by distance."""
    return [] if _is_recall(curves) else [one for one in curves if not one.is_recall]


def _is_recall(curves: Sequence[CurveMember]) -> bool:
    """Return whether the curves of a group are recall by distance; those that failed may lack depths."""
    return any(one.is_recall for one in curves) and all(len(one.curve.lengths) == 1 for one in curves)


def _filled(curves: Sequence[CurveMember]) -> list[str]:
    """Return where the texts of recall and their copies fill the trained length; verdicts of curves name it."""
    found = {one.name: trained_length_filled(one) for one in curves if one.summary and one.is_recall}
    return [f"{name}: {filled}" for name, filled in found.items() if filled]


def draw_curves(curves: Sequence[CurveMember], folder: str | Path, title: str, name: str = "curve") -> list[Path]:
    """Draw curves into NAME.png and NAME.svg and return the two paths."""
    return draw_figure(curve_figure(curves, title), folder, name)


def print_curves(curves: Sequence[CurveMember], console: Terminal, *, paper: bool = False) -> None:
    """Print the memory lengths of some curves, a column for each, their verdicts and their accuracies by length.

    Args:
        paper: also print the memory lengths of the Forgetting Curve's paper.
    """
    what = {one.what for one in curves}
    about = f", {min(what)}" if len(what) == 1 else ""
    points = {one.name: {point["length"]: point for point in one.points()} for one in curves}
    texts = sample_size((point["n"] for known in points.values() for point in known.values() if point["n"]), "text")
    _print_lengths(f"memory lengths{about} (tokens to be copied, {texts})", LEADING, curves, console)
    for one in curves:
        console.print_line(verdict(one), style="bold")
    halves = [(one, half) for one in curves for half in ("copy", "control")]
    head = ["length", *(half if len(curves) == 1 else f"{one.name} {half}" for one, half in halves)]
    lines = [
        [f"{length:,}", *(_accuracy(points[one.name].get(length), half) for one, half in halves)]
        for length in sorted({length for known in points.values() for length in known})
    ]
    title = "accuracy by length: copy after reading the text, control after reading another (means)"
    console.print_table("; ".join(filter(None, (title, _which_depth(curves)))), head, lines, num_keys=1)
    if paper:
        _print_lengths("memory lengths of the paper", (*COLUMNS[len(LEADING) :], *PAPER_COLUMNS), curves, console)


def _print_lengths(title: str, names: Sequence[str], curves: Sequence[CurveMember], console: Terminal) -> None:
    """Print a table of some memory lengths, and what they mean."""
    lines = [[spoken(name), *(str(getattr(one.summary, name)) for one in curves)] for name in names]
    console.print_table(title, ["", *(one.name for one in curves)], lines, num_names=1)
    meanings = "; ".join(f"{spoken(name)}: {HEADLINE[name]}" for name in names)
    console.print(meanings, style="dim", highlight=False)


def _accuracy(point: Point | None, half: str) -> str:
    """Return copy or control of a point; the statuses of its rows where it was not measured."""
    if point is None:
        return ""
    return number(point[half]) if half in point else why_missing(point)


def _recall(one: CurveMember) -> list[list[str]]:
    """Return the lines of a table with the columns RECALL, for a map at one length. Points that were not measured show
    the status of their rows."""
    lines = []
    for depth, name in depth_names(one.everywhere.depths.tolist()).items():
        (point,) = one.points(depth)
        numbers = [why_missing(point), "not measured", "", ""]
        if "copy" in point:
            means = [ranged(point, name) for name in ("memory_index", "copy", "control")]
            numbers = [f"{point['distance']:,.0f}", *means]
        lines.append([name, *numbers])
    return lines


def _recall_tables(curves: Sequence[CurveMember]) -> list[dict[str, Any]]:
    """Return a table of recall by distance for the page; none if no curve of a group has it."""
    is_whole = _is_recall(curves)
    some = [one for one in curves if is_whole or one.is_recall]
    lines = [[one.name, *line] for one in some for line in _recall(one)]
    title = f"Recall by distance, {_about_recall(some)}"
    return [{"title": title, "head": ["model", *RECALL], "lines": lines}] if some else []


def _about_recall(curves: Sequence[CurveMember]) -> str:
    """Return what a table of recall by distance shows: lengths of the texts, units and sample size."""
    lengths = ", ".join(f"{length:,}" for length in sorted({one.curve.lengths[-1] for one in curves}))
    means = ", ".join(filter(None, ("means", recall_figure(curves).note)))  # no note where nothing was measured
    return f"texts of {lengths} tokens (depth: share of the text; distance in tokens; {means})"


def _line(one: CurveMember, names: Sequence[str]) -> dict[str, Any]:
    """Return a line of the table of memory lengths."""
    line: dict[str, Any] = {"method": one.method, "name": one.name, "trained": one.trained_length}
    line |= {"cells": None, "failed": ", ".join(sorted(set(one.curve.failures.values())))}
    if one.summary is not None:
        half = one.in_characters(one.summary.half_life)
        cells = {name: _cell(getattr(one.summary, name)) for name in names}
        if half is not None:
            cells["half_life"]["more"] = [f"{_cell(half)['value']} characters"]
        line |= {"cells": list(cells.values()), "repeats": one.summary.repeats}
    return line


def _cell(length: stats.MemoryLength) -> dict[str, Any]:
    value, _, interval = str(length).partition(" ")
    why = length.reason
    if length.censored:
        why = f"more than was measured; what ended the measurement: {length.reason}"
    return {"value": value, "interval": interval, "why": why, "more": []}


def _difference(one: Difference) -> dict[str, str]:
    return {
        "first": one.curves[0],
        "second": one.curves[1],
        "name": one.name.replace("_", "-"),
        "value": f"{one.known} {one.unit if one.unit != 'tokens' and one.is_known else ''}".strip(),
        "interval": one.interval,
        "p": p_of_difference(one),
        "pairs": f"{one.pairs:,}" if one.pairs else "unpaired",
    }


def _text_test(one: TextTest) -> dict[str, Any]:
    """Return a table over lengths, its numbers in points of accuracy."""
    lines = [
        {
            "length": f"{at.length:,}",
            "means": [f"{100 * at.means[source]:.1f}" for source in one.result.sources],
            "value": at.reason if at.difference is None else f"{100 * at.difference:+.1f}",
            "interval": at.interval,
            "p": [p_value(p) for p in (at.paired_holm, at.tost_holm, at.anova_holm, at.kruskal_holm)],
            "verdict": at.verdict,
        }
        for at in one.result.lengths
    ]
    return {"about": one, "summary": robustness_lines(one.result), "lines": lines}


def _lengths(one: CurveMember) -> Iterator[dict[str, Any]]:
    if one.summary is None:
        return
    for measure in (*COLUMNS, *PAPER_COLUMNS):
        length: stats.MemoryLength = getattr(one.summary, measure)
        characters = one.in_characters(length)
        ends = ("low", "high", "censored", "interval_censored", "below", "reason")
        line = {name: getattr(length, name) for name in ends}
        line |= {"measure": measure, "tokens": length.value, "trained_length": one.trained_length}
        line |= {"repeats": one.summary.repeats, "characters": None if characters is None else characters.value}
        yield whose(one) | line
