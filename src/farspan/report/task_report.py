"""The report of any task: its quality by model, method and length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farspan.report.cells import cells_of
from farspan.report.export import CsvTable, capitalised
from farspan.report.figure import Figure, Heat
from farspan.report.figures import draw_quality, group_figure
from farspan.report.runs import Group, Member
from farspan.report.tables import print_quality
from farspan.terminal import Terminal


class TaskReport:
    """The results of some groups of one task. Tasks with more to report than their quality override its parts; `kinds`
    lists them.

    Args:
        folder: where pictures go.
    """

    name = ""  # of the task in titles; "": the name of its quality
    picture = "quality"  # name of its pictures
    prefix = ""  # of the names of its pictures, where other tasks have pictures of these names
    member: type[Member] = Member  # class of the members of its groups

    def __init__(self, groups: Sequence[Group], folder: Path) -> None:
        self.groups, self.folder = groups, folder

    def name_of(self, group: Group) -> str:
        """Return the name of a group's task in titles; "": the name of its quality."""
        return self.name

    def heading(self, group: Group) -> str:
        """Return the title of a group's section: the task as it is spelled, or its name with its settings in words."""
        name = capitalised(self.name_of(group))
        task, colon, _ = group.title.partition(":")
        if not name or (colon and task.isidentifier()):
            return group.title
        return name if group.title == group.task else f"{name}, {group.title}"

    def print(self, console: Terminal) -> None:
        """Print a table for each group."""
        for group in self.groups:
            print_quality(cells_of(group), group.entry["quality"], console)

    def draw(self) -> list[Path]:
        """Draw the pictures into the folder and return their paths."""
        return draw_quality(self.groups, self.folder, self.prefix + self.picture)

    def figure(self, group: Group) -> Figure | Heat | None:
        """Return the figure that shows one group; None if it has no result."""
        return group_figure(group)

    def as_data(self) -> dict[str, Any]:
        """Return this task's keys of the `--json` output."""
        return {}

    def section(self, group: Group, number: int) -> dict[str, Any]:
        """Return the further parts of the page's section of one group: `about`, `figures`, `tables`.

        Args:
            number: of the section, for the ids of figures.
        """
        return {}

    def summary(self) -> dict[str, Any]:
        """Return the parts of the page that are about all groups together."""
        return {}

    def csv_tables(self) -> dict[str, CsvTable]:
        """Return tables by file name."""
        return {}
