"""From rows to tables, figures and pages. Nothing here needs a model, or torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspan.record import Row
    from farspan.report.terminal import Results


def results(rows: "Iterable[Row]", header: Mapping[str, Any], folder: str | Path, **options: Any) -> "Results":
    """Return the results of one run, to be printed, drawn, or taken as JSON; see `farspan.report.terminal.Results`."""
    from farspan.report.terminal import Results  # rich and matplotlib take a while

    return Results(rows, header, folder, **options)
