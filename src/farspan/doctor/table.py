"""The checks as a table in the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from farspan.doctor.subject import Check


def print_checks(checks: list[Check], title: str, console: Console) -> int:
    """Print the checks as a table; return how many failed."""
    table = Table(title=title, title_justify="left")
    for column in ("", "check", "measured", "allowed", ""):
        table.add_column(column, overflow="fold")
    marks = {True: Text("✓", style="green"), False: Text("✗", style="red"), None: Text("–")}
    for check in checks:
        measured = check.measured if isinstance(check.measured, str) else f"{check.measured:.2g}"
        table.add_row(marks[check.passed], check.name, measured, check.allowed, check.note)
    console.print(table)
    failed = sum(check.passed is False for check in checks)
    applied = sum(check.passed is not None for check in checks)
    summary = f"{applied - failed} of {applied} checks passed, {len(checks) - applied} not applicable"
    console.print(summary, style="red" if failed else "green", highlight=False)
    return failed
