"""What is shown of any task: its quality by model, method and length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farspan.report.cells import cells_of
from farspan.report.export import CsvTable
from farspan.report.figures import draw_quality
from farspan.report.runs import Group
from farspan.report.tables import print_quality
from farspan.terminal import Terminal


class TaskReport:
    """The results of some groups of one task. Tasks with more to show than their quality override its parts; `kinds`
    lists them.

    Args:
        folder: where pictures go.
    """

    name = ""  # of the task in titles; "": the name of its quality
    picture = "quality"  # name of its pictures

    def __init__(self, groups: Sequence[Group], folder: Path) -> None:
        self.groups, self.folder = groups, folder

    def print(self, console: Terminal) -> None:
        """Print a table for each group."""
        for group in self.groups:
            print_quality(cells_of(group), group.entry["quality"], console)

    def draw(self) -> list[Path]:
        """Draw the pictures into the folder and return their paths."""
        return draw_quality(self.groups, self.folder, self.picture)

    def as_data(self) -> dict[str, Any]:
        """Return keys of what `--json` prints."""
        return {}

    def section(self, group: Group, number: int) -> dict[str, Any]:
        """Return what the page shows of one group, which has that number, besides its quality."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Return what the page shows of all groups together."""
        return {}

    def csv_tables(self) -> dict[str, CsvTable]:
        """Return tables by file name."""
        return {}
