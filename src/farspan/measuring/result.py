"""The result of a measurement: its rows, tables and pictures."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from farspan.extras import optional_import
from farspan.record import Row, read_header
from farspan.report.terminal import Results


@dataclass(frozen=True)
class Measured:
    """The content of a run folder."""

    folder: Path
    rows: list[Row] = field(repr=False)  # of a repeated measurement, the last
    missing: dict[str, str] = field(default_factory=dict)  # by shard what other shards still have to measure

    @cached_property
    def results(self) -> Results:
        return Results(self.rows, read_header(self.folder), self.folder)

    def table(self) -> Any:
        """Return a pandas.DataFrame: a line for each model, method, task and length.

        Raises:
            ValueError: pandas is not installed.
        """
        return optional_import("pandas", "table").DataFrame(
            [asdict(cell) for cells in self.results.cells for cell in cells]
        )

    def plot(self) -> list[Path]:
        """Draw the pictures of the run into its folder and return their paths."""
        return self.results.draw()
