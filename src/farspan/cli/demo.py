"""`farspan demo`."""

from pathlib import Path
from typing import Annotated

import typer

from farspan.cli.messages import ROWS_KEPT, one_line_errors
from farspan.cli.options import RUN, option
from farspan.terminal import Terminal


def demo(
    out: Annotated[Path, option(RUN, "Folder of the runs and the picture.", metavar="FOLDER")] = Path("runs/demo"),
    fresh: Annotated[bool, option(RUN, "Measure again instead of continuing.", "--fresh")] = False,
) -> None:
    """Measure the forgetting curve of the embedded model, offline and in under a minute, and draw it."""
    with one_line_errors(ROWS_KEPT):
        from farspan.demo import run_demo

        if run_demo(out, Terminal(), fresh=fresh):
            raise typer.Exit(1)
