"""The results that a command prints, draws and returns as JSON after a measurement."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from farspan.record import ABSENT, Row
from farspan.record.rows import writers_files
from farspan.report.cells import as_data, as_plain, cells_of, failures
from farspan.report.figures import PRICES, cost_figure
from farspan.report.kinds import MEMBERS, reports
from farspan.report.picture import draw_grid
from farspan.report.runs import Source, grouped
from farspan.report.tables import print_comparison, write_comparison
from farspan.report.task_report import TaskReport
from farspan.terminal import Terminal

LEFT_OUT = ("ok", "budget", *ABSENT)  # statuses of rows that did not fail


class Results:
    """The results of one run: of a comparison its tables, else the report of each task.

    Args:
        header: run.json of the run.
        folder: where pictures and tables go.
        test: test whether several texts give the same forgetting curve.
        compared: whether `farspan compare` measured the run; default what its header records.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        header: Mapping[str, Any],
        folder: str | Path,
        *,
        test: bool = False,
        compared: bool | None = None,
    ) -> None:
        self.folder = Path(folder)
        if compared is not None:
            header = {**header, "settings": {**header["settings"], "compared": compared}}
        self.source = Source.of(self.folder.resolve().name, folder, header, rows)
        self.groups = grouped([self.source], MEMBERS)
        self.cells = [cells_of(group) for group in self.groups]
        self._test = test

    @cached_property
    def parts(self) -> list[TaskReport]:
        return reports(self.groups, self.folder, test=self._test)

    def print(self, console: Terminal) -> None:
        """Print the tables, what failed (to standard error), and where rows and pictures are."""
        pictures = self.draw()
        if self.source.is_comparison:
            self._print_comparison(console)
        else:
            for part in self.parts:
                part.print(console)
        self._print_failures(Terminal(stderr=True))
        files = writers_files(self.folder, ".jsonl")
        console.print_line(f"rows: {files[0] if len(files) == 1 else self.folder / 'rows*.jsonl'}")
        for path in pictures:
            console.print_line(f"picture: {path}")

    def _print_comparison(self, console: Terminal) -> None:
        every = [cell for cells in self.cells for cell in cells]
        print_comparison(every, console)
        for path in write_comparison(every, self.folder):
            console.print_line(f"table: {path}")
        console.print_line(f"page: farspan report {self.folder}")

    def _print_failures(self, errors: Terminal) -> None:
        rows = self.source.rows
        if absent := [row for row in rows if row.status in ABSENT]:
            first = f"first at length {absent[0].length:,}, repeat {absent[0].repeat}: {absent[0].reason}"
            errors.print_line(f"{len(absent)} of {len(rows)} rows have no number, {first}", style="dim")
        failed = [row for row in rows if row.status not in LEFT_OUT]
        if not failed:
            return
        counted = f"{len(failed)} of {len(rows)} rows failed"
        if self.source.is_comparison:
            lines = [f"{counted}:", *failures([cell for cells in self.cells for cell in cells])]
        else:
            lines = [f"{counted}, first: {failed[0].status}: {failed[0].reason}"]
        for line in lines:
            errors.print_line(line, style="red")

    def draw(self) -> list[Path]:
        """Draw the pictures into the folder, once, and return their paths."""
        return self._pictures

    @cached_property
    def _pictures(self) -> list[Path]:
        if self.source.is_comparison:
            grid = [[cost_figure(cells, price) for price in PRICES] for cells in self.cells]
            grid = [figures for figures in grid if any(figures)]
            return draw_grid(grid, self.folder, "compare") if grid else []
        return [path for part in self.parts for path in part.draw()]

    @property
    def num_failed(self) -> int:
        """How many cells of a comparison, else how many rows, have no result."""
        if self.source.is_comparison:
            return sum(cell.failed not in ("", *ABSENT) for cells in self.cells for cell in cells)
        return sum(row.status not in LEFT_OUT for row in self.source.rows)

    def as_data(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        data: dict[str, Any] = {"run": str(self.folder)}
        every = [cell for cells in self.cells for cell in cells]
        if self.source.is_comparison:
            data |= {"cells": [as_plain(cell) for cell in every], "failed_cells": self.num_failed}
        else:
            for part in self.parts:
                data |= part.as_data()
            if self.groups:
                first = self.groups[0]
                data |= {"task": first.spec, "quality": first.entry["quality"]["name"], "unit": first.entry["unit"]}
            data |= {"results": as_data(every), "failed_rows": self.num_failed}
        return data | {"pictures": [str(path) for path in self.draw()]}
