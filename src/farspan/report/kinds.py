"""The reports of tasks that show more than quality by length, by the task of their rows. The terminal, the page and the
CSV files all use this table."""

from collections.abc import Sequence
from pathlib import Path

from farspan.report.attention import AttentionReport
from farspan.report.curve_section import CurveReport
from farspan.report.depths import DepthReport
from farspan.report.perplexity import PerplexityReport
from farspan.report.runs import Group
from farspan.report.task_report import TaskReport

KINDS: dict[str, type[TaskReport]] = {
    "curve": CurveReport,
    "perplexity": PerplexityReport,
    "attention": AttentionReport,
    "passkey": DepthReport,
    "needle": DepthReport,
}


MEMBERS = {task: kind.member for task, kind in KINDS.items()}


def reports(groups: Sequence[Group], folder: Path, **of_curves: bool) -> list[TaskReport]:
    """Return the results of some groups, those of one kind together.

    Args:
        folder: where pictures go.
        of_curves: `test` and `paper` of CurveReport.
    """
    found: list[TaskReport] = []
    for kind in dict.fromkeys((*KINDS.values(), TaskReport)):
        if mine := [group for group in groups if KINDS.get(group.task, TaskReport) is kind]:
            found.append(kind(mine, folder, **(of_curves if kind is CurveReport else {})))
    for part in found:
        if isinstance(part, DepthReport) and len(found) > 1:
            part.prefix = "depth-"  # curves also have maps, and other tasks also have pictures of their quality
    return found
