"""The results that a command prints, draws and returns as JSON after a measurement."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from farspan.record import NOT_FAILED, Row
from farspan.record.rows import writers_files
from farspan.report.cells import Cell, as_data, as_plain, cells_of, failures
from farspan.report.export import CsvTable, quality_table
from farspan.report.figure import Figure, Heat
from farspan.report.figures import PRICES, cost_figure, group_figure
from farspan.report.kinds import MEMBERS, reports
from farspan.report.notices import notices
from farspan.report.picture import draw_grid
from farspan.report.runs import Source, grouped, no_rows
from farspan.report.tables import print_comparison, print_costs, write_comparison
from farspan.report.task_report import TaskReport
from farspan.terminal import Terminal


def failed_rows(rows: Sequence[Row]) -> tuple[int, str]:
    """Return how many rows failed, and a line about them; "" if none did."""
    failed = [row for row in rows if row.status not in NOT_FAILED]
    if not failed:
        return 0, ""
    first = f"first: {failed[0].status}: {failed[0].reason}"
    return len(failed), f"{len(failed)} of {len(rows)} rows failed, {first}"


class Results:
    """The results of one run: of a comparison its tables, else the report of each task.

    Args:
        header: run.json of the run.
        folder: where pictures and tables go.
        of_curves: `test` and `paper` of CurveReport.
    """

    def __init__(self, rows: Iterable[Row], header: Mapping[str, Any], folder: str | Path, **of_curves: bool) -> None:
        self.folder = Path(folder)
        self.source = Source.of(self.folder.resolve().name, folder, header, rows)
        self.groups = grouped([self.source], MEMBERS)
        self.cells = [cells_of(group) for group in self.groups]
        self._of_curves = of_curves

    @cached_property
    def parts(self) -> list[TaskReport]:
        return reports(self.groups, self.folder, **self._of_curves)

    @property
    def _every_cell(self) -> list[Cell]:
        return [cell for cells in self.cells for cell in cells]

    def print(self, console: Terminal) -> None:
        """Print the tables, what failed (to standard error), and where rows and pictures are."""
        pictures = self.pictures
        self.print_tables(console)
        if self.source.is_comparison and self.source.rows:
            for path in write_comparison(self._every_cell, self.folder, notices([self.source])):
                console.print_line(f"table: {path}")
            console.print_command(f"page: {shlex.join(['farspan', 'report', str(self.folder)])}")
        errors = Terminal(stderr=True)
        if self.absent:
            errors.print_line(self.absent, style="dim")
        for line in self.failures:
            errors.print_line(line, style="red")
        files = writers_files(self.folder, ".jsonl")
        console.print_line(f"rows: {files[0] if len(files) == 1 else self.folder / 'rows*.jsonl'}")
        for path in pictures:
            console.print_line(f"picture: {path}")

    def print_tables(self, console: Terminal) -> None:
        for line in notices([self.source]) if self.source.rows else [no_rows(self.folder)]:
            console.print_line(line, style="yellow")
        if self.source.is_comparison:
            print_comparison(self._every_cell, console)
        else:
            for part in self.parts:
                part.print(console)
        print_costs(self._every_cell, console)

    @property
    def absent(self) -> str:
        """How many rows have no number although they did not fail, and why, in a line; "" if none."""
        absent = [row for row in self.source.rows if row.status in NOT_FAILED and row.status != "ok"]
        if not absent:
            return ""
        first = f"first at length {absent[0].length:,}, repeat {absent[0].repeat}: {absent[0].reason}"
        return f"{len(absent)} of {len(self.source.rows)} rows have no number, {first}"

    @property
    def failures(self) -> list[str]:
        """What failed, in lines."""
        count, line = failed_rows(self.source.rows)
        if count and self.source.is_comparison:
            return [f"{count} of {len(self.source.rows)} rows failed:", *failures(self._every_cell)]
        return [line] if count else []

    def tables(self) -> dict[str, CsvTable]:
        """Return the tables of numbers that the page has as CSV files, by name."""
        files = {name: table for part in self.parts for name, table in part.csv_tables().items()}
        return {"quality": quality_table(self._every_cell)} | {
            name.removesuffix(".csv"): table for name, table in files.items()
        }

    def figures(self) -> dict[str, Figure | Heat | None]:
        """Return the figure of each task, by its spelling; None for tasks without a result."""
        return {group.spec: part.figure(group) for part in self.parts for group in part.groups}

    @cached_property
    def pictures(self) -> list[Path]:
        """The paths of the pictures, which are drawn into the folder when this is first read."""
        if self.source.is_comparison:
            grid = []
            for group, cells in zip(self.groups, self.cells, strict=True):
                better = group.entry["quality"]["higher_is_better"]
                grid.append([group_figure(group), *(cost_figure(cells, price, better) for price in PRICES)])
            return draw_grid(grid, self.folder, "compare")
        return [path for part in self.parts for path in part.draw()]

    @property
    def num_failed(self) -> int:
        """The number of cells (of a comparison), else of rows, that failed. A cost that failed counts as a cell, once
        for all tasks, unless its cell failed too."""
        if self.source.is_comparison:
            cells = self._every_cell
            costs = {(cell.whose, cell.length) for cell in cells if cell.cost_failed and not cell.has_failed}
            return len(costs) + sum(cell.has_failed for cell in cells)
        return failed_rows(self.source.rows)[0]

    def as_data(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        data: dict[str, Any] = {"run": str(self.folder)}
        if self.source.is_comparison:
            data |= {"cells": [as_plain(cell) for cell in self._every_cell], "failed_cells": self.num_failed}
        else:
            for part in self.parts:
                data |= part.as_data()
            if self.groups:
                first = self.groups[0]
                data |= {"task": first.spec, "quality": first.entry["quality"]["name"], "unit": first.entry["unit"]}
            data |= {"results": as_data(self._every_cell), "failed_rows": self.num_failed}
        return data | {"pictures": [str(path) for path in self.pictures]}
