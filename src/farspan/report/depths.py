"""The report of tasks that query a text at several depths: also their quality over length and depth."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from farspan.report.cells import Cell, cells_of, judged
from farspan.report.export import CsvTable, capitalised, quality_of
from farspan.report.figure import Heat, sample_size
from farspan.report.figures import depth_map, depth_names, point
from farspan.report.interactive import on_page
from farspan.report.picture import draw_figure
from farspan.report.runs import Group, short_names
from farspan.report.task_report import TaskReport
from farspan.terminal import Terminal

COLUMNS = ("run", "model", "method", "task", "length", "depth", "n", "value", "low", "high", "failed")
ByDepth = dict[float, list[Cell]]  # the cells of one member, by depth


class DepthReport(TaskReport):
    """Quality by length, and by length and depth where there are several depths."""

    @cached_property
    def by_depth(self) -> dict[Group, list[ByDepth]]:
        """The cells of the members of each group; none for groups with one depth."""
        return {group: found for group in self.groups if len((found := _by_depth(group))[0]) > 1}

    def print(self, console: Terminal) -> None:
        super().print(console)
        for group, members in self.by_depth.items():
            for one in members:
                console.print_table(f"by depth: {_title(group, one)}", *_table(one), num_names=1)

    def draw(self) -> list[Path]:
        """Also draw map.png, or a map-N.png for each of several members, each also as SVG."""
        paths = super().draw()
        maps = [(group, one) for group, members in self.by_depth.items() for one in members]
        maps = [(group, one) for group, one in maps if any(cell.value is not None for cell in _all(one))]
        for place, (group, one) in enumerate(maps, 1):
            name = "map" if len(maps) == 1 else f"map-{place}"
            title = f"{capitalised(_title(group, one))}\n{group.title}"
            paths += draw_figure(_map(one, title), self.folder, self.prefix + name)
        return paths

    def section(self, group: Group, number: int) -> dict[str, Any]:
        members = self.by_depth.get(group, [])
        figures = [
            on_page(f"depth-{number}-{index}", f"By length and depth: {_all(one)[0].name}", "", _map(one))
            for index, one in enumerate(members)
        ]
        heads = [(f"By depth: {_all(one)[0].name}", *_table(one)) for one in members]
        return {
            "figures": figures,
            "tables": [{"title": title, "head": head, "lines": lines} for title, head, lines in heads],
        }

    def csv_tables(self) -> dict[str, CsvTable]:
        """Return depths.csv, a line for each run, model, method, task, length and depth."""
        lines = [
            {name: getattr(cell, name) for name in COLUMNS if name != "depth"} | {"depth": depth}
            for members in self.by_depth.values()
            for one in members
            for depth, cells in one.items()
            for cell in cells
        ]
        return {"depths.csv": CsvTable(COLUMNS, lines)} if lines else {}


def _by_depth(group: Group) -> list[ByDepth]:
    """Return the cells of each member by depth, ascending; p is corrected over all depths."""
    at_depth: list[tuple[float, Cell]] = []
    for depth in sorted({row.depth for one in group.members for row in one.rows}):
        at = [replace(one, rows=[row for row in one.rows if row.depth == depth]) for one in group.members]
        at_depth += [(depth, cell) for cell in cells_of(replace(group, members=at))]
    found: dict[tuple[str, str, str], ByDepth] = {}
    for (depth, _), cell in zip(at_depth, judged([cell for _, cell in at_depth], group), strict=True):
        found.setdefault(cell.whose, {}).setdefault(depth, []).append(cell)
    return list(found.values())


def _all(one: ByDepth) -> list[Cell]:
    return [cell for cells in one.values() for cell in cells]


def _lengths(one: ByDepth) -> list[int]:
    """Return all lengths, ascending. A refused length has a row at depth 0 alone."""
    return sorted({cell.length for cell in _all(one)})


def _title(group: Group, one: ByDepth) -> str:
    """Return quality and name of a member."""
    first = _all(one)[0]
    name = first.name if len(group.members) > 1 else short_names([first.model])[first.model]
    return f"{first.quality} of {name}"


def _table(one: ByDepth) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of a table: a line for each depth, a column for each length."""
    lengths, names = _lengths(one), depth_names(list(one))
    refused = {cell.length: cell.failed for cell in _all(one) if cell.failed == "refused"}
    lines = []
    for depth, cells in one.items():
        found = {cell.length: quality_of(cell) or cell.failed for cell in cells}
        lines.append([names[depth], *(found.get(length) or refused.get(length, "") for length in lengths)])
    return ["depth", *(f"{length:,}" for length in lengths)], lines


def _map(one: ByDepth, title: str = "") -> Heat:
    names = depth_names(list(one))
    points = {
        (depth, cell.length): (cell.value, [*point(cell)[:2], f"depth {names[depth]}", *point(cell)[2:]])
        for depth, cells in one.items()
        for cell in cells
        if cell.value is not None
    }
    failed = {(depth, cell.length): cell.failed for depth, cells in one.items() for cell in cells if cell.failed}
    note = sample_size((cell.n for cell in _all(one) if cell.value is not None), "example", intervals=False)
    return depth_map(title, _lengths(one), list(one), points, failed, _all(one)[0].quality, note)
