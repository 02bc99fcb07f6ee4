"""The result of a measurement: its rows, tables and pictures."""

import shutil
from base64 import b64encode
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.extras import optional_import
from farspan.files import added, expanded
from farspan.record import Row, latest, read_header, read_rows, refuse_file
from farspan.record.rows import writers_files
from farspan.specs import check_known
from farspan.terminal import Terminal, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

    from farspan.report.export import CsvTable
    from farspan.report.terminal import Results  # scipy and matplotlib take a while, and plans need neither

NOTEBOOK_COLUMNS = 120  # characters of a line of tables in a notebook
NOTEBOOK_PICTURES = 6


@dataclass(frozen=True)
class Measured:
    """The content of a run folder. A notebook shows its tables and pictures."""

    folder: Path
    rows: list[Row] = field(repr=False)  # only the last of a repeated measurement
    missing: dict[str, str] = field(default_factory=dict)  # what other shards still have to measure, by shard

    @cached_property
    def results(self) -> "Results":
        from farspan.report.terminal import Results

        return Results(self.rows, read_header(self.folder), self.folder)

    def to_pandas(self) -> "DataFrame":
        """Return the rows, one line each, failed ones included, with a column for each field, setting and score, such
        as `settings.protocol` and `scores.copy`, as `farspan export --to parquet` writes them. Missing values are NaN;
        lists and objects are JSON.

        Raises:
            ValueError: pandas is not installed.
        """
        from farspan.report.exports.rows import rows_table

        return _frame(rows_table(self.results.source))

    def table(self, name: str = "quality") -> "DataFrame":
        """Return a table of results with 95 % intervals, as `farspan report` writes it as CSV.

        Args:
            name: `quality`, a line for each model, method, task and length; for forgetting curves also `curves` and
                `memory_lengths`; for perplexities also `perplexity` and, where all tokens were scored, `positions`.

        Raises:
            ValueError: no such table, as in a run without rows, or pandas is not installed.
        """
        tables = self.results.tables()
        if name not in tables:
            self._refuse_empty()
        check_known("table", name, tables)
        return _frame(tables[name])

    def plot(self, ax: "Axes | None" = None, *, task: str | None = None) -> "Axes":
        """Draw the results of one task on matplotlib axes and return them.

        Args:
            ax: axes to draw on; default: the axes of a new pyplot figure.
            task: a task of the run, as spelled or by its name; required if there are several.

        Raises:
            ValueError: no such task, several tasks and none given, or a task without a result.
        """
        from farspan.report.legends import add_legend_inside
        from farspan.report.picture import SIZE, draw_on, draw_with_legend, show_text_as_is

        spec = self._task(task)
        figure = self.results.figures()[spec]
        if figure is None:
            why = " ".join(self.results.failures) or self.results.absent
            raise ValueError(f"{self.folder}: {spec} has no result to plot: {why}")
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=SIZE, layout="constrained")
            draw_with_legend(ax, figure)
        else:
            draw_on(ax, figure)
            if ax.get_legend_handles_labels()[0]:
                add_legend_inside(ax)
        show_text_as_is(ax)
        return ax

    def _refuse_empty(self) -> None:
        from farspan.report.runs import no_rows

        if not self.rows:
            raise ValueError(no_rows(self.folder))

    def _task(self, name: str | None) -> str:
        """Return a task of the run as it is spelled."""
        self._refuse_empty()
        specs = [group.spec for group in self.results.groups]
        found = [spec for spec in specs if name is None or name in (spec, spec.partition(":")[0])]
        if len(found) > 1:
            raise ValueError(f"{self.folder} has the tasks {'; '.join(found)}: name one of them, plot(task=...)")
        if not found:
            check_known("task", str(name), specs)
        return found[0]

    def save(self, folder: str | Path | None = None) -> list[Path]:
        """Draw the run's pictures into its folder, or write the run with its pictures into another, which
        `farspan.open_run` reads. Return the paths of the pictures.

        Args:
            folder: new, empty, or with the same run, whose files are replaced; default: the run's own.

        Raises:
            ValueError: the folder holds something else.
        """
        if folder is None or expanded(folder).resolve() == self.folder.resolve():
            return self.results.pictures
        to = expanded(folder)
        refuse_file(to)
        if to.exists() and any(to.iterdir()):
            if not (to / "run.json").exists():
                raise ValueError(f"{to} is not empty and holds no run (no run.json): choose another folder")
            if read_header(to)["settings"] != read_header(self.folder)["settings"]:
                raise ValueError(f"{to} holds another run: choose another folder")
        to.mkdir(parents=True, exist_ok=True)
        files = [*writers_files(self.folder, ".jsonl"), self.folder / "examples.jsonl", self.folder / "run.json"]
        with added(to, last="run.json") as beside:
            for file in files:
                if file.exists():
                    shutil.copyfile(file, beside / file.name)
        return open_run(to).results.pictures

    def _repr_html_(self) -> str:
        """Return tables and pictures as HTML, for notebooks."""
        from farspan.report.picture import as_png

        console = Terminal(file=StringIO(), record=True, width=NOTEBOOK_COLUMNS, force_jupyter=False)
        self.results.print_tables(console)
        tables = console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
        without = [line for line in (self.results.absent, *self.results.failures) if line]
        lines = "".join(f"<p>{escape(shown(line))}</p>" for line in without)
        figures = [one for one in self.results.figures().values() if one is not None]
        pictures = "".join(
            f'<img src="data:image/png;base64,{b64encode(as_png(one)).decode()}" alt="{escape(shown(one.title))}">'
            for one in figures[:NOTEBOOK_PICTURES]
        )
        if (more := len(figures) - NOTEBOOK_PICTURES) > 0:
            pictures += f"<p>and {more} more: plot(task=...)</p>"
        return f"<p>{escape(shown(str(self.folder)))}: {len(self.rows):,} rows</p>{tables}{lines}{pictures}"


def _frame(table: "CsvTable") -> "DataFrame":
    return optional_import("pandas", "table").DataFrame(list(table.lines), columns=list(table.columns))


def open_run(folder: str | Path) -> Measured:
    """Return the result of a recorded run, as `farspan.measure` returned it.

    Raises:
        ValueError: the folder holds no run, or a damaged one.
    """
    return Measured(expanded(folder), latest(read_rows(folder)))
