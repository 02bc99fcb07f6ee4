"""All commands, in one app."""

import os
import sys
from typing import Annotated

import typer

from farspan import __version__
from farspan.cli import ask, attention, compare, curve, demo, doctor, index, perplexity, report, task, train
from farspan.cli.options import spread

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="farspan measures how far back a language model remembers, and extends it.",
    pretty_exceptions_enable=False,
)
# in the order in which `farspan --help` lists them
measures = (curve.curve, curve.recall, perplexity.perplexity, attention.attention, task.task, compare.compare)
for command in (demo.demo, *measures, ask.ask, index.index, doctor.doctor, report.report):
    app.command()(spread(command))
app.command("import")(report.import_file)
train_app = typer.Typer(no_args_is_help=True, help="Train or extend a model. A config is one TOML file.")
train_app.command("lm")(train.train_lm)
train_app.command("smt")(train.train_smt)
train_app.command("mlm")(train.train_mlm)
train_app.command("cepe")(train.train_cepe)
train_app.command("distill")(train.train_distill)
app.add_typer(train_app, name="train")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"farspan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # transformers' own progress and advice would bury ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1" if not sys.stderr.isatty() else "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
