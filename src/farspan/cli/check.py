"""`farspan check`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farspan.cli.messages import ROWS_KEPT, err, one_line_errors, print_notice
from farspan.cli.options import TASK, AsJson, Batch, Chunk, Loading, Model, Out, option
from farspan.terminal import Terminal

if TYPE_CHECKING:
    from farspan.report.changes import Kind

FAILED, WORSE, UNDECIDED = 1, 3, 4  # exit codes; 2: wrong input


def check(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE_RUN", help="Run folder of the baseline.")],
    model: Model = None,
    *,
    tolerance: Annotated[
        list[str] | None,
        option(
            TASK,
            "Largest change that counts as equal: KIND=SHARE, or SHARE for all kinds. Default memory=0.05, "
            "perplexity=0.02, score=0.05, cost=0.2. Repeatable.",
            metavar="SHARE",
        ),
    ] = None,
    strict: Annotated[
        bool, option(TASK, "Exit with 4 if a number is undecided and none is worse.", "--strict")
    ] = False,
    baseline_model: Annotated[
        str | None, option(TASK, "Model of the baseline run, if it holds several.", metavar="MODEL")
    ] = None,
    cost: Annotated[bool, option(TASK, "Also measure tokens per second and memory, if the baseline has them.")] = True,
    loading: Loading,
    out: Out = None,
    batch: Batch = None,
    chunk: Chunk = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model as a baseline run was measured, and test whether memory, perplexity and cost have changed.

    Exit codes: 0 nothing is worse, 1 rows failed, 2 wrong input, 3 worse, 4 undecided (with --strict).
    """
    with one_line_errors(ROWS_KEPT):
        tolerances = read_tolerances(tolerance or [])
        model = loading.only_model(model)
        loading.refuse_chunk(chunk, [model])
        from farspan.measuring.again import measure_again, read_baseline
        from farspan.measuring.loop import Watch
        from farspan.record import read_header
        from farspan.report.changes import compare
        from farspan.report.changes_table import print_changes
        from farspan.report.notices import unfinished
        from farspan.report.progress import Display
        from farspan.report.runs import Source, of_model
        from farspan.report.terminal import failed_rows

        before = read_baseline(baseline, baseline_model)
        if lacking := unfinished(before):
            print_notice(lacking)
        console = err if as_json else Terminal()
        with Display(console) as display:
            watch = Watch(display.start, display.row, display.notice, display.share)
            loader = loading.loader()
            sizes = {"batch": batch, "chunk": chunk}
            measured = measure_again(before, model, cost=cost, loader=loader, out=out, watch=watch, **sizes)
        every = Source.of(measured.folder.name, measured.folder, read_header(measured.folder), measured.rows)
        now = of_model(every, loader(model, weights=False).name)  # --out may hold other models that were checked
        found = compare(before, now, tolerances)
        print_changes(found, console)
        num_failed, line = failed_rows(now.rows)
        if line:
            err.print_line(line, style="red")
        console.print_line(f"verdict: {found.verdict}", style="bold red" if found.verdict == "worse" else "bold")
        console.print_line(f"measurements of the model: {measured.folder}")
        if as_json:
            about = {
                "baseline": str(baseline),
                "unfinished": lacking,
                "run": str(measured.folder),
                "model": model,
                "tolerances": tolerances,
            }
            print(json.dumps(about | found.as_data() | {"failed_rows": num_failed}))
        if found.verdict == "worse":
            raise typer.Exit(WORSE)
        if num_failed:
            raise typer.Exit(FAILED)
        if strict and found.verdict == "undecided":
            raise typer.Exit(UNDECIDED)


def read_tolerances(given: list[str]) -> "dict[Kind, float]":
    """Return the tolerance of each kind of number.

    Args:
        given: "KIND=SHARE", or "SHARE" for all kinds; later ones override earlier ones.

    Raises:
        ValueError: an unknown kind, or a share that is not between 0 and 1.
    """
    from farspan.report.changes import TOLERANCES
    from farspan.specs import check_known

    found = dict(TOLERANCES)
    for text in given:
        kind, equals, share = text.rpartition("=")
        if equals:
            check_known("--tolerance", kind, TOLERANCES)
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not 0 < value < 1:
            raise ValueError(f"--tolerance {text}: got {share!r}, expected a share between 0 and 1, such as 0.05")
        found |= {one: value for one in TOLERANCES if not equals or one == kind}
    return found
