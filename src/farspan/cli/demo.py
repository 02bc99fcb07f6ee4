"""`farspan demo`."""

from pathlib import Path
from typing import Annotated

import typer

from farspan.cli.options import ROWS_KEPT, said
from farspan.terminal import Terminal


def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and the picture go.")] = Path("runs/demo"),
    fresh: Annotated[bool, typer.Option(help="Measure again instead of continuing.")] = False,
) -> None:
    """The forgetting curve of the embedded model: offline, in under a minute, ends with a picture."""
    with said(ROWS_KEPT):
        from farspan.demo import run_demo

        if run_demo(out, Terminal(), fresh=fresh):
            raise typer.Exit(1)
