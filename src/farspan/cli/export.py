"""`farspan export`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from farspan.cli.messages import one_line_errors, print_notice, print_written
from farspan.cli.options import RUN, AsJson, option

FORMAT = "Format"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    to: Annotated[
        str,
        option(
            FORMAT,
            "parquet, csv: the rows. every-eval-ever: JSON of that schema. hf-eval-results: .eval_results of a "
            "model on the Hub. model-card: a section with tables and pictures. lm-eval: the forgetting curve as a task "
            "of lm-evaluation-harness. tensorboard, wandb, trackio, mlflow: each model as a run of that tracker, where "
            "it is installed.",
            metavar="FORMAT",
        ),
    ],
    out: Annotated[
        Path | None, option(RUN, "Folder for the files; default: export in the run folder.", metavar="FOLDER")
    ] = None,
    model: Annotated[str | None, option(FORMAT, "One of the run's models; default: all of them.")] = None,
    dataset: Annotated[
        str | None,
        option(FORMAT, "For hf-eval-results: data set on the Hub under which results are filed; default: the text."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run in the format of another tool."""
    with one_line_errors():
        from farspan.report.exports import FORMATS, TRACKERS
        from farspan.report.exports import export as exported

        trackers = {name: partial(_send, name, notice=print_notice) for name in TRACKERS}
        formats = FORMATS | {"lm-eval": partial(_lm_eval, notice=print_notice)} | trackers
        written = exported(run, to, out, model=model, dataset=dataset, formats=formats, notice=print_notice)
        print_written(written, as_json)


def _lm_eval(*given: Any, **options: Any) -> list[Path]:
    from farspan.measuring.lm_eval import write_lm_eval  # needs torch, for the tokenizer

    return write_lm_eval(*given, **options)


def _send(to: str, *given: Any, **options: Any) -> list[Path]:
    from farspan.measuring.trackers import send  # needs torch, as transformers' integrations do

    return send(to, *given, **options)
