"""`farspan export`."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from farspan.cli.options import RUN, AsJson, err, one_line_errors, option
from farspan.terminal import Terminal

FORMAT = "Format"
Format = Literal[
    "parquet", "csv", "every-eval-ever", "hf-eval-results", "model-card", "lm-eval", "tensorboard", "wandb", "trackio",
    "mlflow",
]  # fmt: skip


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    to: Annotated[
        Format,
        option(
            FORMAT,
            "parquet, csv: the rows. every-eval-ever: JSON of that schema. hf-eval-results: .eval_results of a "
            "model on the Hub. model-card: a section with tables and pictures. lm-eval: the forgetting curve as a task "
            "of lm-evaluation-harness. tensorboard, wandb, trackio, mlflow: each model as a run of that tracker, where "
            "it is installed.",
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
        from farspan.report.exports import FORMATS
        from farspan.report.exports import export as exported

        def notice(line: str) -> None:
            err.print_line(line, style="yellow")

        formats = FORMATS
        if to == "lm-eval":
            from farspan.measuring.lm_eval import write_lm_eval  # needs torch, for the tokenizer

            formats = {to: write_lm_eval}
        elif to not in formats:
            from farspan.measuring.trackers import send  # needs torch, as transformers' integrations do

            formats = {to: partial(send, to, notice=notice)}
        written = exported(run, to, out, model=model, dataset=dataset, formats=formats, notice=notice)
        for path in written:
            (err if as_json else Terminal()).print_line(str(path))
        if as_json:
            print(json.dumps({"written": [str(path) for path in written]}))
