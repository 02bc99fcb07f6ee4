"""The tasks that have more to show than their quality by length, by the task of their rows: one table, used by the
terminal, the page and the CSV files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farspan.report import attention, curve_section, perplexity
from farspan.report.export import CsvTable
from farspan.report.runs import Group
from farspan.terminal import Terminal


class TaskResults(Protocol):
    """What one run holds of one kind of task."""

    def print(self, console: Terminal) -> None: ...

    def draw(self) -> list[Path]: ...  # into the run folder

    def as_data(self) -> dict[str, Any]: ...  # keys of what `--json` prints


@dataclass(frozen=True)
class Kind:
    name: str  # in titles
    results: Callable[[Sequence[Group], Path], TaskResults]
    section: Callable[[Group, int], dict[str, Any]]  # of the page, for the group of that number
    csv_tables: Callable[[Sequence[Group]], Mapping[str, CsvTable]] = lambda groups: {}  # by file name
    summary: Callable[[Sequence[Group]], dict[str, Any]] = lambda groups: {}  # of the page, for all groups together


KINDS = {
    "curve": Kind(
        "forgetting curve",
        curve_section.CurveResults,
        curve_section.section,
        curve_section.csv_tables,
        curve_section.summary,
    ),
    "perplexity": Kind("perplexity", perplexity.PerplexityResults, perplexity.section, perplexity.csv_tables),
    "attention": Kind("attention", attention.AttentionResults, attention.section),
}
