"""`farspan report` and `farspan import`: rows that exist already."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from farspan.cli.measured import print_results
from farspan.cli.messages import err, one_line_errors, print_notice, print_written
from farspan.cli.options import RUN, AsJson, option
from farspan.terminal import Terminal


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[Path, option(RUN, "Folder for the page and the tables.", metavar="FOLDER")] = Path("report"),
    as_json: AsJson = False,
) -> None:
    """Write one page about runs, to open offline: results, comparisons and failures; also as Markdown and CSV."""
    with one_line_errors():
        from farspan.report.page import write_report

        print_written(write_report(runs, out, print_notice), as_json)


def import_file(
    file: Annotated[Path, typer.Argument(help="Result file of the authors' script: JSON with copy_accs and lm_accs.")],
    out: Annotated[Path, option(RUN, "Run folder to make.", metavar="FOLDER")],
    model: Annotated[
        str | None, option(RUN, "Name of the model with these results; default: that of the file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a run from published results, with their memory lengths and a picture."""
    with one_line_errors():
        from farspan.files import expanded
        from farspan.record import Run
        from farspan.tasks.published import read_authors_file

        file, out = expanded(file), expanded(out)
        rows = read_authors_file(file, model or file.stem)
        content = hashlib.sha256(file.read_bytes()).hexdigest()[:16]  # a changed file is refused, not mixed in
        about = {"task": "curve", "imported": file.name, "hash": content, "model": model or file.stem}
        with Run.open(out, about) as run:
            known = {row.key for row in run.rows}
            for row in rows:
                if row.key not in known:
                    run.append(row)
            print_results(run.rows, out, err if as_json else Terminal(), as_json, paper=True)
